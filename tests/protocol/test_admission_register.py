"""Who belongs to a run: rulings, delegates, invitations, and what nobody can do with them."""

import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol import limits
from protocol.address.peer_id import peer_id_from_public_key
from protocol.admission import register as register_file
from protocol.admission.register import Mode, Register
from protocol.admission.statements import MAX_SERIAL, BadToken, Pass, Ruling, Token, Verdict
from protocol.errors import RemoteProtocolError

RUN_ID = "ab" * 16
NOW_S = 1_700_000_000


class Person:
    """A key pair, and the peer id that belongs to it."""

    def __init__(self, number):
        self._key = Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))
        self.key = self._key.public_key().public_bytes_raw()
        self.peer_id = peer_id_from_public_key(self.key)

    def rules(self, verdict, other, serial=1, run_id=RUN_ID):
        about = other.peer_id
        return Ruling.made(run_id, verdict, about, serial, self.key, self._key.sign).sealed

    def invites(self, uses=1, expires_s=NOW_S + 60, number=9):
        seed = number.to_bytes(32, "big")
        return Token.made(RUN_ID, expires_s, uses, seed=seed, signer=self.key, sign=self._key.sign)


FOUNDER, ANN, BEN, CAT, DAN = map(Person, range(1, 6))


def register(mode=Mode.INVITE, listed=()):
    return Register(mode, RUN_ID, FOUNDER.key, [person.peer_id for person in listed])


def admitted(held):
    return [person for person in (ANN, BEN, CAT) if held.refusal_of(person.peer_id) is None]


@pytest.mark.parametrize(
    ("mode", "expected"), [(Mode.OPEN, [ANN, BEN, CAT]), (Mode.LIST, [ANN]), (Mode.INVITE, [ANN])]
)
def test_where_nothing_is_ruled_the_mode_decides(mode, expected):
    assert admitted(register(mode, [ANN])) == expected


def test_a_guest_enters_with_its_pass_and_nobody_else_does():
    held = register()
    own = FOUNDER.invites().pass_for(ANN.peer_id).sealed
    assert "another peer" in held.shown(own, BEN.peer_id, NOW_S)
    assert held.shown(own, ANN.peer_id, NOW_S) is None
    assert admitted(held) == [ANN]


def test_an_invitation_is_for_so_many_peers_and_so_long():
    held, token = register(), FOUNDER.invites(uses=1)
    ann, ben = (token.pass_for(person.peer_id).sealed for person in (ANN, BEN))
    assert "expired" in held.shown(ann, ANN.peer_id, NOW_S + 60)
    assert held.shown(ann, ANN.peer_id, NOW_S) is None
    assert "1 peers" in held.shown(ben, BEN.peer_id, NOW_S)
    assert held.shown(ann, ANN.peer_id, NOW_S + 60) is None  # one that was taken stays good


def test_a_pass_that_a_member_passes_on_was_shown_in_time():
    held = register()
    assert held.take(FOUNDER.invites(expires_s=1).pass_for(ANN.peer_id).sealed)
    assert admitted(held) == [ANN]


def test_an_invitation_by_somebody_who_may_not_invite_is_worth_nothing():
    held = register()
    own = BEN.invites().pass_for(ANN.peer_id).sealed
    assert "may invite" in held.shown(own, ANN.peer_id, NOW_S)
    assert not held.take(own)
    assert held.take(FOUNDER.rules(Verdict.DELEGATE, BEN))
    assert held.shown(own, ANN.peer_id, NOW_S) is None
    assert admitted(held) == [ANN, BEN]


def test_what_a_former_delegate_signed_counts_no_longer():
    held = register()
    held.take(FOUNDER.rules(Verdict.DELEGATE, BEN, 1))
    held.take(BEN.rules(Verdict.ADMIT, CAT))
    held.take(BEN.invites().pass_for(ANN.peer_id).sealed)
    assert admitted(held) == [ANN, BEN, CAT]
    held.take(FOUNDER.rules(Verdict.ADMIT, BEN, 2))
    assert admitted(held) == [BEN]


def test_only_the_founder_delegates_and_only_the_founder_rules_on_delegates():
    held = register(Mode.OPEN)
    held.take(FOUNDER.rules(Verdict.DELEGATE, ANN))
    held.take(FOUNDER.rules(Verdict.DELEGATE, BEN))
    assert not held.take(ANN.rules(Verdict.DELEGATE, CAT))
    held.take(ANN.rules(Verdict.BAN, BEN, 9))
    held.take(ANN.rules(Verdict.BAN, CAT, 9))
    assert admitted(held) == [ANN, BEN]


def test_the_founder_takes_a_ban_back_and_an_old_one_does_not_return():
    held = register(Mode.OPEN)
    ban, back = FOUNDER.rules(Verdict.BAN, ANN, 1), FOUNDER.rules(Verdict.ADMIT, ANN, 2)
    assert held.take(ban)
    assert "banned" in held.refusal_of(ANN.peer_id)
    assert held.take(back)
    assert not held.take(ban)
    assert admitted(held) == [ANN, BEN, CAT]
    assert held.next_serial(FOUNDER.key, ANN.peer_id) == 3


def test_who_takes_the_highest_serial_takes_nobody_elses_word():
    """Neither the founder's on anybody, nor another delegate's on any other peer."""
    held = register(Mode.OPEN)

    def rules(signer, verdict, other):
        serial = held.next_serial(signer.key, other.peer_id)
        return serial is not None and held.take(signer.rules(verdict, other, serial))

    assert rules(FOUNDER, Verdict.DELEGATE, ANN)
    assert rules(FOUNDER, Verdict.DELEGATE, BEN)
    held.take(ANN.rules(Verdict.BAN, CAT, MAX_SERIAL))
    assert not rules(BEN, Verdict.ADMIT, CAT)  # it would count for nothing
    for verdict in (Verdict.BAN, Verdict.ADMIT, Verdict.BAN, Verdict.ADMIT):
        assert rules(BEN, verdict, DAN)
        assert held.is_banned(DAN.peer_id) == (verdict is Verdict.BAN)
    assert rules(FOUNDER, Verdict.ADMIT, ANN)  # no delegate any more
    assert admitted(held) == [ANN, BEN, CAT]
    assert rules(BEN, Verdict.BAN, CAT)
    assert rules(FOUNDER, Verdict.ADMIT, CAT)
    assert not rules(BEN, Verdict.BAN, CAT)
    assert not rules(BEN, Verdict.BAN, ANN)  # of whom the founder has ruled
    assert admitted(held) == [ANN, BEN, CAT]


def test_the_last_word_of_several_delegates_holds():
    held = register(Mode.OPEN)
    held.take(FOUNDER.rules(Verdict.DELEGATE, ANN))
    held.take(FOUNDER.rules(Verdict.DELEGATE, BEN))
    said = (ANN, Verdict.BAN), (BEN, Verdict.ADMIT), (ANN, Verdict.BAN), (ANN, Verdict.ADMIT)
    for signer, verdict in said:
        serial = held.next_serial(signer.key, CAT.peer_id)
        assert held.take(signer.rules(verdict, CAT, serial))
        assert held.is_banned(CAT.peer_id) == (verdict is Verdict.BAN)


def test_a_ban_is_stronger_than_list_and_pass():
    held = register(Mode.INVITE, [ANN])
    held.take(FOUNDER.invites().pass_for(BEN.peer_id).sealed)
    for person in (ANN, BEN):
        held.take(FOUNDER.rules(Verdict.BAN, person))
    assert admitted(held) == []


def test_the_order_in_which_statements_come_does_not_matter_where_the_founders_come_first():
    said = [
        ANN.rules(Verdict.BAN, CAT, 1),
        ANN.rules(Verdict.ADMIT, CAT, 2),
        ANN.invites().pass_for(BEN.peer_id).sealed,
    ]
    seen = set()
    for order in itertools.permutations(said):
        held = register()
        held.take(FOUNDER.rules(Verdict.DELEGATE, ANN))
        for statement in order:
            held.take(statement)
        other = register()
        assert all(other.take(statement) for statement in held.statements)
        seen.add((*map(id, admitted(held)), frozenset(held.statements)))
        assert admitted(other) == admitted(held)
    assert len(seen) == 1


def test_what_was_changed_or_is_meant_for_another_run_is_refused():
    held = register()
    good = FOUNDER.rules(Verdict.BAN, ANN)
    bad = [good[:-1], good + b"\0", b"", b"\x92", good[:20] + b"x" + good[21:], bytes(600)]
    bad.append(FOUNDER.rules(Verdict.BAN, ANN, run_id="cd" * 16))
    bad.append(FOUNDER.invites().invitation.sealed)
    for data in bad:
        with pytest.raises(RemoteProtocolError):
            held.take(data)
    own = FOUNDER.invites().pass_for(ANN.peer_id).sealed
    assert "cannot be used" in held.shown(own[:-1], ANN.peer_id, NOW_S)
    assert held.statements == ()


def test_the_founders_rulings_always_find_room(monkeypatch):
    monkeypatch.setattr(register_file, "MAX_RULINGS", 2)
    held = register(Mode.OPEN)
    held.take(FOUNDER.rules(Verdict.DELEGATE, ANN))
    assert held.take(ANN.rules(Verdict.BAN, BEN))
    assert not held.take(ANN.rules(Verdict.BAN, CAT))
    assert held.take(FOUNDER.rules(Verdict.BAN, CAT))
    assert admitted(held) == [ANN, BEN]


def test_passes_are_bounded(monkeypatch):
    monkeypatch.setattr(register_file, "MAX_PASSES", 1)
    held, token = register(), FOUNDER.invites(uses=5)
    assert held.shown(token.pass_for(ANN.peer_id).sealed, ANN.peer_id, NOW_S) is None
    assert "as many" in held.shown(token.pass_for(BEN.peer_id).sealed, BEN.peer_id, NOW_S)
    assert admitted(held) == [ANN]


def test_a_token_comes_back_from_its_text_and_damage_is_told():
    token = FOUNDER.invites(uses=3)
    text = token.text
    assert Token.parse(f" {text}\n") == token
    assert text not in (str(token), repr(token))
    for damaged in ("", "hello", text[:-3], text[:40] + "A" + text[41:], text + "AAAA"):
        with pytest.raises(BadToken, match="copy the whole word"):
            Token.parse(damaged)
    assert Pass.read(token.pass_for(ANN.peer_id).sealed, RUN_ID) == token.pass_for(ANN.peer_id)


def test_statements_fit_their_bound():
    long = FOUNDER.rules(Verdict.DELEGATE, ANN, (1 << 53) - 1)
    own = FOUNDER.invites(4096, 10**11).pass_for(ANN.peer_id).sealed
    assert max(len(long), len(own)) <= limits.MAX_STATEMENT_BYTES
