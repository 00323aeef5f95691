"""Which peers this peer serves: those that the run admits, and that behave. Links to others end.

protocol/admission/register.py has the rules of admission. Here they are applied to our own pass,
to statements kept in the home or forwarded by linked peers, and to the run's secret. Amendments of
the run (protocol/run/amendments.py) are statements too, and so is the name of its successor.

The secret names the places of the run's records in the directory, so that only admitted peers find
its members. Members tell it to peers that they have admitted; its digest is in the run spec, so a
wrong secret is recognised. An open run has none.

Until the run is known no peer is judged: a newcomer knows only the address that it was given.

Reputation is what we have seen of a peer ourselves (protocol/membership/book.py). Faults are not
told to others. Only the proof that an owner has lied (protocol/diloco/audits.py) reaches all peers,
and bans it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import blake3
import trio
from trio.lowlevel import ParkingLot

from peer.facts import Facts
from peer.network.identity import Identity
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.runtime import PeerId
from peer.state.kept_files import KeptAdmission
from protocol.admission.register import Mode, Register
from protocol.admission.statements import Ruling, Successor, Token, Verdict
from protocol.errors import LocoError
from protocol.limits import (
    MAX_AMENDMENTS,
    MAX_PASSES,
    MAX_RULINGS,
    MAX_STATEMENTS_PER_MESSAGE,
    RUN_SECRET_BYTES,
)
from protocol.membership.book import Fault, PeerBook
from protocol.outcomes import RefusalReason
from protocol.run.amendments import AmendedSpec, Amendment, Changes, take_statement
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.wire.messages import Hello, Refusal, Statements

from .services import DaemonServices

SECRET_DOMAIN: Final = b"loco/v1/run-secret\0"
MAX_EARLY: Final = 1 + (MAX_RULINGS + MAX_PASSES + MAX_AMENDMENTS) // MAX_STATEMENTS_PER_MESSAGE
"""Messages kept until the run is known: as many as hold all statements of a run."""


class Admission:
    """Judges other peers; keeps, forwards and signs statements.

    Attributes:
        own_pass: what we show; empty where we have none.
        expelled: set when the run has banned us.
    """

    def __init__(self, services: DaemonServices) -> None:
        self._keys = services.keys
        self._file = services.admission_file
        self._directory = services.directory
        self._facts = services.facts
        self._events = services.events
        self._kept = self._file.read()
        self.own_pass = self._kept.own_pass
        if services.token is not None:
            self.own_pass = services.token.pass_for(self._keys.own.peer_id).sealed
        self._register: Register | None = None
        self._early: list[Statements] = []
        self._secret: bytes | None = None
        self._secret_digest: str | None = None
        self._secret_known = trio.Event()
        self.expelled = trio.Event()

    # --- the run ----------------------------------------------------------------------------------
    def closed(self, spec: RunSpec) -> RunSpec:
        """The spec of a new run; with the digest of a new secret where not everybody may join."""
        if Mode(spec.admission.mode) is Mode.OPEN:
            return spec
        assert self._keys.founder is not None
        signature = self._keys.founder.sign(SECRET_DOMAIN + spec.to_bytes())
        self._secret = blake3.blake3(signature).digest(length=RUN_SECRET_BYTES)
        self._secret_known.set()
        digest = blake3.blake3(self._secret).hexdigest()
        admission = spec.admission.model_copy(update={"secret_digest": digest})
        return spec.model_copy(update={"admission": admission})

    def founded(self, signed: SignedSpec, expert: int | None) -> None:
        self.entered(signed)
        if expert is not None:
            self.trains(expert)
        if self._secret is not None:
            self.rule(Verdict.ADMIT, self._keys.own.peer_id)

    def entered(self, signed: SignedSpec) -> None:
        """Know the run."""
        spec, founder = signed.spec(), signed.founder_public_key
        admission, mode = spec.admission, Mode(spec.admission.mode)
        register = Register(mode, signed.run_id, founder, admission.peers)
        self._register = register
        self._facts.expert_run = spec if spec.experts else None
        self._facts.spec = AmendedSpec(spec, signed.run_id, founder)
        self._facts.run_id = signed.run_id
        self._secret_digest = admission.secret_digest
        if mode is Mode.OPEN:
            self._secret_known.set()
        if self._kept.run_id == signed.run_id:
            self._take_secret(self._kept.secret)
            for statement in self._kept.statements:
                self._take(statement)
        self._kept = KeptAdmission(run_id=signed.run_id)
        early, self._early = self._early, []
        for message in early:
            self.heard(message)
        self._keep()

    def trains(self, expert: int) -> None:
        """Go by the spec of this expert, as the run has been amended."""
        self._facts.expert = self.amended.run.experts[expert].name
        self._facts.spec = self.amended.of_expert(expert)

    async def directory_name(self, group: str) -> str:
        """A group's name in the directory; waits until the run's secret is known."""
        await self._secret_known.wait()
        return group if self._secret is None else f"{group}/{self._secret.hex()}"

    @property
    def amended(self) -> AmendedSpec:
        assert self._facts.spec is not None
        return self._facts.spec

    @property
    def wants_invitations(self) -> bool:
        return self._register is not None and self._register.mode is Mode.INVITE

    @property
    def known_peers(self) -> frozenset[PeerId]:
        return frozenset() if self._register is None else self._register.known_peers

    @property
    def may_sign(self) -> bool:
        return self._register is not None and self._signer(self._register) is not None

    # --- judging ----------------------------------------------------------------------------------
    def greeted(self, peer_id: PeerId, theirs: Hello) -> Refusal | None:
        """Why a peer that sent this hello gets no link."""
        register, refusal = self._register, self.refusal_of(peer_id)
        if register is None or refusal is None or not theirs.pass_shown:
            return refusal
        why = register.shown(theirs.pass_shown, peer_id, self._directory.swarm_time_s())
        if why is not None:
            return Refusal(RefusalReason.NOT_ADMITTED, why)
        refusal = self.refusal_of(peer_id)
        if refusal is None:
            self._keep()
        return refusal

    def refusal_of(self, peer_id: PeerId) -> Refusal | None:
        why = None if self._register is None else self._register.refusal_of(peer_id)
        return None if why is None else Refusal(RefusalReason.NOT_ADMITTED, why)

    def may_be_dialled(self, peer_id: PeerId) -> bool:
        """Whether a peer may be admitted, perhaps by a pass that we have not seen."""
        register = self._register
        if register is None or register.refusal_of(peer_id) is None:
            return True
        return register.mode is Mode.INVITE and not register.is_banned(peer_id)

    # --- telling and hearing ----------------------------------------------------------------------
    def all_told(self) -> list[Statements]:
        """Every statement, and the secret, for a peer that we have admitted."""
        held = () if self._register is None else self._statements
        return self._messages(held) or ([Statements((), self._secret)] if self._secret else [])

    def _messages(self, statements: Sequence[bytes]) -> list[Statements]:
        size, named = MAX_STATEMENTS_PER_MESSAGE, self._named
        plain = [statement for statement in statements if statement not in named]
        parts = (plain[at : at + size] for at in range(0, len(plain), size))
        messages = [Statements(tuple(part), self._secret) for part in parts]
        told = [Statements((), self._secret, each) for each in named if each in statements]
        return messages + told

    def heard(self, message: Statements) -> list[Statements]:
        """Take statements that a linked peer forwarded. Returns the new ones, for the others.

        Raises:
            RemoteProtocolError: something in it is no statement of this run.
        """
        register = self._register
        if register is None:
            if len(self._early) < MAX_EARLY:
                self._early.append(message)
            return []
        knew_secret = self._secret is not None
        self._take_secret(message.secret)
        told = (*message.statements, *filter(None, [message.successor]))
        new = [statement for statement in told if self._take(statement)]
        self._after(new)
        if new or knew_secret != (self._secret is not None):
            self._keep()
        return self._messages(new)

    def _take(self, statement: bytes) -> bool:
        """Keep a statement if it is new. Returns whether it was. Raises RemoteProtocolError."""
        taken = take_statement(
            statement, self._known_register(), self.amended, self._facts.successor
        )
        if isinstance(taken, Successor):
            self._facts.successor = taken
            run_id, address = taken.run_id, taken.address
            self._events.emit(EventName.SUCCESSOR_NAMED, successor=run_id, address=address)
        elif isinstance(taken, Amendment):
            keys = [key for key, _ in taken.changes]
            version, round_ = taken.version, taken.from_round
            self._events.emit(EventName.RUN_AMENDED, version=version, round=round_, keys=keys)
        return taken is not False

    @property
    def _named(self) -> tuple[bytes, ...]:
        """The statement of the successor, where there is one."""
        named = self._facts.successor
        return () if named is None else (named.sealed,)

    @property
    def _statements(self) -> tuple[bytes, ...]:
        """All statements; amendments last, because they may close the run to some of the rest."""
        assert self._register is not None
        amendments = (amendment.sealed for amendment in self.amended.amendments)
        return (*self._register.statements, *amendments, *self._named)

    def _after(self, new: Iterable[bytes]) -> None:
        register = self._register
        assert register is not None
        for ruling in map(register.ruling_in, new):
            if ruling is not None:
                verdict = str(ruling.verdict)
                self._events.emit(EventName.PEER_RULED_ON, remote=ruling.peer_id, verdict=verdict)
        if register.is_banned(self._keys.own.peer_id):
            self.expelled.set()

    def _take_secret(self, secret: bytes | None) -> None:
        if secret is None or self._secret is not None or self._secret_digest is None:
            return
        if blake3.blake3(secret).hexdigest() == self._secret_digest:
            self._secret = secret
            self._secret_known.set()

    def _keep(self) -> None:
        """A full disk loses only the latest statements."""
        kept = KeptAdmission(self._kept.run_id, self._secret, self.own_pass, self._statements)
        try:
            self._file.write(kept)
        except OSError as error:
            self._facts.now_doing(f"cannot keep {self._file!r}: {error.strerror}")

    # --- signing ----------------------------------------------------------------------------------
    def rule(self, verdict: Verdict, peer_id: PeerId) -> list[Statements]:
        """Rule on a peer. Returns the messages for all other peers.

        Raises:
            LocoError: this home may not sign for the run, or the ruling would count for nothing.
            RemoteProtocolError: that is no peer id.
        """
        register, signer = self._signing()
        key, serial = signer.public_key, register.next_serial(signer.public_key, peer_id)
        # Checked first: one that counts for nothing now would count once the other is taken back.
        if serial is not None:
            signed = Ruling.made(self._run_id, verdict, peer_id, serial, key, signer.sign)
            if register.take(signed.sealed):
                self._after([signed.sealed])
                self._keep()
                return self._messages([signed.sealed])
        raise LocoError(
            f"only the founder may {verdict} this peer; ask the person who started the run"
        )

    def invite(self, seed: bytes, lasts_s: float, uses: int) -> Token:
        """Raises LocoError: this home may not invite, or nobody needs an invitation."""
        register, signer = self._signing()
        if register.mode is not Mode.INVITE:
            raise LocoError(f"this run needs no invitations: its admission is '{register.mode}'")
        expires_s = int(self._directory.swarm_time_s() + lasts_s)
        return Token.made(
            self._run_id, expires_s, uses, seed=seed, signer=signer.public_key, sign=signer.sign
        )

    def amend(self, from_round: int, changes: Changes, peers: Iterable[PeerId]) -> list[Statements]:
        """Amend the run, and admit `peers` whatever its mode. Returns the messages for all others.

        Raises:
            LocoError: this home does not hold the founder's key, or the run was amended too often.
        """
        founder, version = self.founder(), self.amended.next_version
        amendments: list[bytes] = []
        if changes:
            if version > MAX_AMENDMENTS:
                raise LocoError(f"a run can be amended {MAX_AMENDMENTS} times, and has been")
            key, sign = founder.public_key, founder.sign
            made = Amendment.made(self._run_id, version, from_round, changes, key, sign)
            self._take(made.sealed)
            amendments = [made.sealed]
        rulings = [
            statement
            for peer_id in peers
            if self.refusal_of(peer_id) is not None
            for message in self.rule(Verdict.ADMIT, peer_id)
            for statement in message.statements
        ]
        self._keep()
        return self._messages([*rulings, *amendments])

    def name_successor(self, successor: str, address: str) -> list[Statements]:
        """Name the run that follows this one. Returns the message for all others.

        Raises:
            LocoError: this home does not hold the founder's key.
            RemoteProtocolError: that is no other run.
        """
        founder, before = self.founder(), self._facts.successor
        version = 1 if before is None else before.version + 1
        key, sign = founder.public_key, founder.sign
        made = Successor.made(self._run_id, version, successor, address, key, sign)
        self._take(made.sealed)
        self._keep()
        return self._messages([made.sealed])

    def founder(self) -> Identity:
        """Raises LocoError: this home does not hold the founder's key."""
        register, signer = self._known_register(), self._keys.founder
        if signer is None or not register.is_founder(signer.public_key):
            raise LocoError(
                "only the founder's key can amend a run, and this home does not have it: run the"
                " command where the run was started (its home has founder.key)"
            )
        return signer

    def _known_register(self) -> Register:
        if self._register is None:
            raise LocoError("the run is not known yet; try again when this peer is training")
        return self._register

    def _signing(self) -> tuple[Register, Identity]:
        register = self._known_register()
        if (signer := self._signer(register)) is not None:
            return register, signer
        raise LocoError(
            "this home may not sign for the run: it has no founder.key and is not a delegate. Run"
            " the command where the run was started, or make this peer a delegate there:"
            f" loco-peer delegate {self._keys.own.peer_id}"
        )

    def _signer(self, register: Register) -> Identity | None:
        keys = (self._keys.founder, self._keys.own)
        return next((key for key in keys if key and register.is_signer(key.public_key)), None)

    @property
    def _run_id(self) -> str:
        assert self._kept.run_id is not None
        return self._kept.run_id


# --- reputation -----------------------------------------------------------------------------------

IGNORED = Refusal(
    RefusalReason.IGNORED,
    "I am ignoring you for a few minutes: you have broken the protocol too often;"
    " install the version of loco-peer that the others run",
)
CONVICTED = Refusal(
    RefusalReason.NOT_ADMITTED,
    "it is proved that you signed an average that does not follow from what you were sent;"
    " check this machine's memory, and join with a new identity",
)


class Reputation:
    """This peer's own opinion of others.

    Attributes:
        one_more_ignored: woken when the links of a peer are to end.
    """

    def __init__(self, admission: Admission, facts: Facts, events: EventLog) -> None:
        self.admission = admission
        self._facts = facts
        self._events = events
        self.book = PeerBook()
        self.one_more_ignored = ParkingLot()

    def refusal_of(self, peer_id: PeerId) -> Refusal | None:
        return self.admission.refusal_of(peer_id) or self.conduct_refusal_of(peer_id)

    def conduct_refusal_of(self, peer_id: PeerId) -> Refusal | None:
        if self.book.is_convicted(peer_id):
            return CONVICTED
        return IGNORED if self.book.is_ignored(trio.current_time(), peer_id) else None

    def wait_s(self, peer_id: PeerId) -> float:
        return self.book.wait_s(trio.current_time(), peer_id)

    def may_be_dialled(self, peer_id: PeerId) -> bool:
        return self.conduct_refusal_of(peer_id) is None and self.admission.may_be_dialled(peer_id)

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        self._facts.faults[fault] += 1
        if self.book.note(trio.current_time(), peer_id, fault):
            self._events.emit(EventName.PEER_IGNORED, remote=peer_id, fault=str(fault))
            self.one_more_ignored.unpark_all()

    def convict(self, peer_id: PeerId) -> None:
        self._facts.convicted += 1
        self.book.convict(peer_id)
        self._events.emit(EventName.PEER_CONVICTED, remote=peer_id)
        self.one_more_ignored.unpark_all()
