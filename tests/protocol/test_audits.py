"""Which averages are audited, and what follows from what is found."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from core_worlds import PROOF, World
from msgspec.structs import replace
from test_fragment_core import LONG_ROUND_S, assert_same_bytes, train

from protocol.diloco import commands as e
from protocol.diloco.audits import AUDITS_PER_RESULT, Audits, Contradiction, read_proof
from protocol.diloco.commands import GroupSeen
from protocol.diloco.cycle_machine import short_digest
from protocol.diloco.peers import Context, Peers, SendPlan
from protocol.limits import MAX_AUDITS, MAX_CONVICTED, MAX_KEPT_EVIDENCE_BYTES
from protocol.outcomes import AuditOutcome
from protocol.wire.fragment_messages import ChunkResult, Doubt, Proof, Result, mask_of

GROUP, SHORT = "ab" * 16, bytes(16)
NAMES = [f"peer{number:02}" for number in range(16)]
CODES = {0: memoryview(b"codes"), 1: memoryview(b"more codes")}


class Auditor:
    """What audits want, one by one."""

    def __init__(self, name: str, seed: bytes = b"") -> None:
        self._commands: list[e.FragmentCommand] = []
        self.peers = Peers(name, 4)
        self.peers.seen = GroupSeen(7, frozenset(NAMES), {})
        self.context = Context(
            SendPlan(GROUP, 4, lambda _: False), self.peers, self._commands.append
        )
        self.audits = Audits(self.context, short_digest(seed or name.encode()) * 2)

    def __call__(self, what: str, *told: Any) -> list[e.FragmentCommand]:
        """Tell them this, by a method's name; what they want."""
        getattr(self.audits, what)(*told)
        commands, self._commands[:] = list(self._commands), []
        return commands


def result(owner: str, cycle: int = 7, fragment: int = 0) -> Result:
    chunks = tuple(ChunkResult(chunk, 1, 1, SHORT, mask_of([0]), SHORT) for chunk in CODES)
    of = (owner,), (1,), (SHORT,)
    return Result(GROUP, fragment, cycle, owner, 1, *of, chunks, tuple(CODES), bytes(64))


def kinds(commands: Sequence[object]) -> Counter[type]:
    return Counter(map(type, commands))


# --- what is audited ------------------------------------------------------------------------------
def test_about_two_of_the_others_audit_a_result_and_none_of_them_always():
    drawn: Counter[str] = Counter()
    parts: Counter[tuple[int, int]] = Counter()
    everybody = [Auditor(name) for name in NAMES[1:]]
    for cycle in range(200):
        for name, audits in zip(NAMES[1:], everybody, strict=True):
            for order in audits("arrived", result(NAMES[0], cycle), CODES):
                assert isinstance(order, e.Audit)
                assert order.codes is CODES[order.chunk]
                drawn[name] += 1
                parts[order.chunk, order.draw % 8] += 1
                audits("audited", order.result, AuditOutcome.TRUE, b"")
    assert drawn.total() / 200 == pytest.approx(AUDITS_PER_RESULT, rel=0.2)
    assert len(drawn) == len(NAMES) - 1
    assert max(drawn.values()) < 60
    assert len(parts) == 2 * 8


def test_draws_are_those_of_a_key_that_others_do_not_know():
    def cycles(seed: bytes) -> list[int]:
        audits = Auditor(NAMES[1], seed)
        return [n for n in range(99) if audits("arrived", result(NAMES[0], n), CODES)]

    assert cycles(b"one") == cycles(b"one")
    assert cycles(b"one") != cycles(b"other")


def held(audits: Auditor, owner: str = NAMES[0]) -> Result:
    """A result that came and was not drawn."""
    for cycle in range(7, 99):
        if not audits("arrived", result(owner, cycle), CODES):
            return result(owner, cycle)
    raise AssertionError("all were drawn")


def test_a_doubt_is_followed_up_once():
    audits = Auditor(NAMES[1])
    about = held(audits)
    doubt = Doubt(GROUP, about.fragment, about.cycle, about.owner)
    (order,) = audits("doubted", doubt)
    assert isinstance(order, e.Audit)
    assert audits("doubted", doubt) == []
    audits("audited", about, AuditOutcome.TRUE, b"")
    assert audits("doubted", doubt) == []


def test_a_doubt_about_what_is_not_here_is_nothing():
    audits = Auditor(NAMES[1])
    about = held(audits)
    for other in (
        Doubt(GROUP, about.fragment, about.cycle + 1, about.owner),
        Doubt(GROUP, about.fragment + 1, about.cycle, about.owner),
        Doubt(GROUP, about.fragment, about.cycle, NAMES[2]),
    ):
        assert audits("doubted", other) == []


def test_no_more_are_audited_at_once_than_may_be():
    audits, asked = Auditor(NAMES[1]), 0
    for number in range(4 * MAX_AUDITS):
        owner = f"{NAMES[0]}/{number}"
        asked += len(audits("arrived", result(owner), CODES))
        asked += len(audits("doubted", Doubt(GROUP, 0, 7, owner)))
    assert asked == MAX_AUDITS


# --- what follows ---------------------------------------------------------------------------------
def test_an_owner_that_lied_is_convicted_once_and_all_but_it_get_the_proof():
    audits, about = Auditor(NAMES[1]), result(NAMES[0])
    commands = audits("audited", about, AuditOutcome.LIE, PROOF)
    assert kinds(commands)[e.Convict] == 1
    assert audits.peers.withdrawn == [NAMES[0]]
    told = {each.peer_id for each in commands if isinstance(each, e.SendMessage)}
    assert told == {*NAMES} - {NAMES[0], NAMES[1]}
    assert audits("proved", NAMES[0], PROOF) == []
    assert audits.audits.is_convicted(NAMES[0])
    (to_newcomer,) = audits("tell", "newcomer")
    assert to_newcomer == e.SendMessage("newcomer", Proof(GROUP, NAMES[0]), memoryview(PROOF))


def test_nobody_convicts_itself():
    audits = Auditor(NAMES[1])
    assert audits("proved", NAMES[1], PROOF) == []


def test_an_owner_that_does_not_open_is_doubted_and_not_convicted():
    audits, about = Auditor(NAMES[1]), result(NAMES[0])
    commands = audits("audited", about, AuditOutcome.UNOPENED, b"")
    assert kinds(commands)[e.Convict] == 0
    assert audits.peers.withdrawn == [NAMES[0]]
    doubts = [each.message for each in commands if isinstance(each, e.SendMessage)]
    assert doubts == [Doubt(GROUP, 0, 7, NAMES[0])] * (len(NAMES) - 2)
    assert audits("audited", about, AuditOutcome.UNOPENED, b"") == []
    assert audits.context.counts.audits == {AuditOutcome.UNOPENED: 2}


def test_an_owner_that_has_gone_is_neither():
    audits, gone = Auditor(NAMES[1]), result("gone")
    assert audits("audited", gone, AuditOutcome.UNOPENED, b"") == []
    assert audits.context.counts.audits == {AuditOutcome.INCONCLUSIVE: 1}


def test_what_is_remembered_of_liars_is_bounded():
    audits, proof = Auditor(NAMES[1]), bytes(MAX_KEPT_EVIDENCE_BYTES // 2)
    for number in range(2 * MAX_CONVICTED):
        audits("proved", f"liar{number}", proof)
    told = [each for each in audits("tell", "newcomer") if isinstance(each, e.SendMessage)]
    assert sum(len(each.codes) for each in told) <= MAX_KEPT_EVIDENCE_BYTES
    assert audits.audits.is_convicted(f"liar{2 * MAX_CONVICTED - 1}")
    assert not audits.audits.is_convicted("liar0")


# --- two results of one owner ---------------------------------------------------------------------
def another(of: Result, **changes: Any) -> Result:
    """One with other values."""
    chunks = tuple(replace(chunk, digest=b"x" * 16) for chunk in of.chunks)
    return replace(of, **{"chunks": chunks, **changes})


def test_two_results_of_one_life_for_one_cycle_convict_their_owner():
    audits, one = Auditor(NAMES[1]), result(NAMES[0])
    other = another(one)
    assert audits("noted", one) == []
    commands = audits("noted", other)
    (convict,) = [each for each in commands if isinstance(each, e.Convict)]
    assert convict.owner == NAMES[0]
    found = read_proof(convict.proof)
    assert isinstance(found, Contradiction)
    assert [found.result, found.other] == [replace(each, carried=()) for each in (one, other)]
    told = {each.peer_id for each in commands if isinstance(each, e.SendMessage)}
    assert told == {*NAMES} - {NAMES[0], NAMES[1]}
    assert audits.audits.is_convicted(NAMES[0])


@pytest.mark.parametrize(
    "changes",
    [{"incarnation": 2}, {"cycle": 8}, {"fragment": 1}, {"owner": NAMES[2]}],
    ids=lambda changes: next(iter(changes)),
)
def test_results_of_other_lives_cycles_fragments_and_owners_contradict_nothing(changes):
    audits, one = Auditor(NAMES[1]), result(NAMES[0])
    assert audits("noted", one) == []
    assert audits("noted", another(one, **changes)) == []


def test_a_result_that_comes_twice_with_other_codes_behind_it_is_the_same():
    audits, one = Auditor(NAMES[1]), result(NAMES[0])
    assert audits("noted", one) == []
    assert audits("noted", replace(one, carried=(1,))) == []


def test_the_newest_two_results_are_remembered_whatever_else_an_owner_signs():
    audits = Auditor(NAMES[1])
    for cycle in range(7, 40):
        assert audits("noted", result(NAMES[0], cycle)) == []
    for old in range(7, 20):
        assert audits("noted", another(result(NAMES[0], old))) == []
    assert audits("noted", another(result(NAMES[0], 38)))


# --- many -----------------------------------------------------------------------------------------
HONEST = "abcd"


def stamps(world: World, name: str) -> list[object]:
    return [world.peers[name].core.ledger(f).stamps for f in range(len(world.num_chunks))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_all_convict_a_liar_and_have_the_same_bytes_again(seed, loss):
    world = World("abcde", seed, num_chunks=[5, 3], loss=loss, delay_s=0.1)
    train(world, range(3), 0.0)
    world.audits["e"] = AuditOutcome.LIE
    train(world, range(3, 8), 0.0)
    world.calm()
    train(world, range(8, 14), 0.0, LONG_ROUND_S)
    world.run(world.now_s + LONG_ROUND_S)
    for name in HONEST:
        assert world.peers[name].banned == ["e"]
        assert stamps(world, name) == stamps(world, "a")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_an_owner_that_did_not_open_for_a_while_is_no_outcast(seed):
    world = World("abcde", seed, num_chunks=[5, 3], delay_s=0.1)
    train(world, range(3), 0.0)
    world.audits["e"] = AuditOutcome.UNOPENED
    train(world, range(3, 6), 0.0)
    del world.audits["e"]
    train(world, range(6, 14), 0.0, LONG_ROUND_S)
    world.run(world.now_s + LONG_ROUND_S)
    assert not any(peer.banned for peer in world.peers.values())
    undone = [c for peer in world.peers.values() for c in peer.commands if _undoes(c)]
    assert undone
    assert_same_bytes(world)


def _undoes(command: e.FragmentCommand) -> bool:
    return isinstance(command, e.UndoSteps)
