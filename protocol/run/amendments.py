"""Amendments: the founder's changes of a run that is under way.

    amendment   ["amendment", run id, version, from_round, [[key, value], ...], founder's key]

The run id stays the digest of the spec that the run was founded by. Amendments are sealed
statements, which travel and are kept with those of admission (protocol/admission/statements.py).
Peers are not in the same round at the same time, so an amendment says from which round on it is in
force: the spec in force is a pure function of the amendments and the round.

Rules
  1. Only the founder amends; what a delegate signs is none.
  2. Versions count up from 1. Of two with one version the one with the lower digest counts.
  3. Round r begins at the nominal step r * H, also where peers number rounds of their own. The spec
     in force at a round is that of the founding with the changes of all amendments from that round
     or an earlier one: the later version wins, key by key.
  4. A newcomer is in no round; so the last version's mode of admission holds as soon as it is
     heard, like a ban.
  5. The run is over at a step when the spec in force there says so.
  6. MAX_AMENDMENTS are kept at most.
  7. `experts.NAME.training.total_steps` is the budget of one expert; rounds are then its own. The
     generalist branches where it would have branched.

A change is a dotted key of the run spec and its new value: how long the run lasts, how fast it
learns, and who may join. Model, data, seed and the way of averaging stay, for weights that were
trained in another way cannot be averaged. A peer that does not know a key refuses the amendment,
and the link that it came by.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import blake3
from pydantic import ValidationError

from protocol.address.peer_id import PUBLIC_KEY_BYTES, Sign
from protocol.admission.register import Mode, Register
from protocol.admission.statements import Successor, check, is_successor, opened, seal
from protocol.errors import InvalidRunSpec, RemoteProtocolError
from protocol.limits import EPSILON, MAX_AMENDMENTS

from .run_spec import RunSpec, what_is_wrong
from .sections import MAX_STEPS

# --- changes --------------------------------------------------------------------------------------
TOTAL_STEPS: Final = "training.total_steps"
LEARNING_RATE: Final = "optimizer.learning_rate"
MODE: Final = "admission.mode"
AMENDABLE: Final = (MODE, LEARNING_RATE, TOTAL_STEPS)
OF_EXPERT: Final = "experts."
FOUND_OUT: Final = (
    "frozen",
    "data.manifest",
    "data.tokenizer_digest",
    "data.document_end",
    "adapter.base",
    "admission.secret_digest",
)
"""Beginnings of keys that the founder's machine fills in."""
PEERS: Final = "admission.peers"

Value = int | float | str
Changes = tuple[tuple[str, Value], ...]
"""Keys and values, sorted by key."""


def changed(spec: RunSpec, changes: Changes) -> RunSpec:
    for key, value in changes:
        name = expert_in(key)
        if name is not None:
            spec = _with_steps(spec, spec.expert_named(name), key, value)
            continue
        if key not in AMENDABLE:
            raise InvalidRunSpec(_not_amendable(key))
        section, _, name = key.partition(".")
        spec = spec.model_copy(update={section: _with(getattr(spec, section), name, key, value)})
    return spec


def expert_in(key: str) -> str | None:
    """The name of the expert whose budget a key is."""
    is_budget = key.startswith(OF_EXPERT) and key.endswith(f".{TOTAL_STEPS}")
    return key[len(OF_EXPERT) : -len(TOTAL_STEPS) - 1] if is_budget else None


def _with_steps(spec: RunSpec, number: int | None, key: str, value: Value) -> RunSpec:
    ensemble, experts = spec.ensemble, list(spec.experts)
    assert ensemble is not None
    assert number is not None
    training = _with(experts[number].training, "total_steps", key, value)
    experts[number] = experts[number].model_copy(update={"training": training})
    branch_round = spec.branch_round
    ensemble = ensemble.model_copy(update={"branch_round": branch_round})
    spec = spec.model_copy(update={"experts": tuple(experts), "ensemble": ensemble})
    if spec.of_expert(0).total_rounds < branch_round:
        least = branch_round * spec.sync.round_steps
        raise InvalidRunSpec(f"{key}: it branches at step {least}; give it as many at least")
    return spec


def _with(section: Any, name: str, key: str, value: Value) -> Any:
    """A section with one other value, which is checked by itself: keys are amended one by one."""
    try:
        checked = type(section).model_validate({name: value})
    except ValidationError as error:
        why = what_is_wrong(error.errors()[0])
        raise InvalidRunSpec(f"{key}: {why} (got {value!r})") from error
    return section.model_copy(update={name: getattr(checked, name)})


def values_of(spec: RunSpec, written: Mapping[str, Any]) -> dict[str, Any]:
    """The values in `spec`, by dotted key, of the keys in the tree of a user's TOML."""
    values = _values(spec)
    return {key: values.get(key) for key, _ in _leaves(written)}


def differing_keys(founding: RunSpec, wanted: RunSpec) -> list[str]:
    """Keys in which a user's run spec differs from a founded one, but for FOUND_OUT."""
    ours, theirs = _values(_as_written(founding)), _values(_as_written(wanted))
    written = (key for key in sorted({*ours, *theirs}) if not key.startswith(FOUND_OUT))
    return [key for key in written if ours.get(key) != theirs.get(key)]


def _as_written(spec: RunSpec) -> RunSpec:
    """Without what the founder's machine fills in of the experts, which are one value."""
    found_out = {"manifest": None, "frozen": None}
    experts = tuple(expert.model_copy(update=found_out) for expert in spec.experts)
    return spec.model_copy(update={"experts": experts})


def value_of(spec: RunSpec, key: str) -> Any:
    """The plain value of a dotted key; None where its section is left out."""
    return _values(spec).get(key)


def _values(spec: RunSpec) -> dict[str, Any]:
    return dict(_leaves(spec.model_dump(mode="json")))


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; experts go by their names."""
    for name, value in tree.items():
        is_list = name == "experts" and value and isinstance(value, list | tuple)
        below = {each["name"]: each for each in value} if is_list else value
        if isinstance(below, Mapping):
            yield from ((f"{name}.{rest}", leaf) for rest, leaf in _leaves(below))
        else:
            yield name, value


def changes_between(spec: RunSpec, wanted: Mapping[str, Any]) -> Changes:
    """The changes that make `spec` as wanted, but for `admission.peers`.

    Args:
        wanted: values by dotted key; other keys stay.

    Raises InvalidRunSpec: a key differs that cannot be amended.
    """
    found: list[tuple[str, Value]] = []
    values = _values(spec)
    for key, value in sorted(wanted.items()):
        if key != PEERS and value != values.get(key):
            if key not in AMENDABLE and expert_in(key) is None:
                raise InvalidRunSpec(_not_amendable(key))
            if key == TOTAL_STEPS and spec.experts:
                own = f"{OF_EXPERT}{spec.experts[0].name}.{key}"
                raise InvalidRunSpec(f"{key}: each expert has its own; amend {own}, or another's")
            found.append((key, value))
    return tuple(found)


def new_peers(spec: RunSpec, wanted: Mapping[str, Any]) -> tuple[str, ...]:
    """The peers that `admission.peers` adds. Raises InvalidRunSpec: it leaves some out."""
    if PEERS not in wanted:
        return ()
    listed = set(wanted[PEERS])
    if left_out := [peer for peer in spec.admission.peers if peer not in listed]:
        raise InvalidRunSpec(
            f"{PEERS}: a peer is not taken off the list; `loco-peer ban {left_out[0]}` keeps it out"
        )
    return tuple(sorted(listed.difference(spec.admission.peers)))


def _not_amendable(key: str) -> str:
    may = ", ".join((*AMENDABLE, f"{OF_EXPERT}NAME.{TOTAL_STEPS}", PEERS))
    return (
        f"{key}: this differs from the run's, and cannot be amended in a run that is under way;"
        f" what can is {may}. Give it the run's value, or leave it out"
    )


# --- amendments -----------------------------------------------------------------------------------
AMENDMENT: Final = "amendment"


@dataclass(frozen=True, slots=True)
class Amendment:
    """A change of a run; `sealed` is the statement that its founder signed."""

    version: int
    from_round: int
    changes: Changes
    sealed: bytes

    @classmethod
    def made(
        cls,
        run_id: str,
        version: int,
        from_round: int,
        changes: Changes,
        founder: bytes,
        sign: Sign,
    ) -> Self:
        pairs = [[key, value] for key, value in changes]
        sealed = seal([AMENDMENT, run_id, version, from_round, pairs, founder], sign)
        return cls(version, from_round, changes, sealed)

    @classmethod
    def read(cls, data: bytes, run_id: str, founder: bytes, founding: RunSpec) -> Self:
        """Check an amendment of this run. Raises RemoteProtocolError."""
        fields, body, signature = opened(data)
        match fields:
            case ["amendment", str(run), int(version), int(from_round), list(pairs), bytes(key)]:
                known = run == run_id and key == founder and len(key) == PUBLIC_KEY_BYTES
                if known and 0 < version <= MAX_AMENDMENTS and 0 <= from_round <= MAX_STEPS:
                    changes = _changes(pairs, founding)
                    check(founder, body, signature)
                    return cls(version, from_round, changes, data)
        raise RemoteProtocolError("not an amendment of this run")


def is_amendment(data: bytes) -> bool:
    """Raises RemoteProtocolError."""
    return opened(data)[0][:1] == [AMENDMENT]


def _changes(pairs: list[object], founding: RunSpec) -> Changes:
    """Raises RemoteProtocolError."""
    found = []
    for pair in pairs:
        match pair:
            case [str(key), int() | float() | str() as value]:
                found.append((key, value))
            case _:
                raise RemoteProtocolError("an amendment's change is no key and value")
    keys = [key for key, _ in found]
    if not keys or keys != sorted(set(keys)):
        raise RemoteProtocolError("an amendment's keys are not in order")
    changes = tuple(found)
    try:
        changed(founding, changes)
    except InvalidRunSpec as error:
        raise RemoteProtocolError(f"an amendment that cannot be used: {error}") from error
    return changes


def spec_at(founding: RunSpec, amendments: tuple[Amendment, ...], round_: int) -> RunSpec:
    """The spec in force at a round (rule 3); amendments are in the order of their versions."""
    for amendment in amendments:
        if amendment.from_round <= round_:
            founding = changed(founding, amendment.changes)
    return founding


SpecsByRound = list[tuple[int, RunSpec]]
"""Rounds from which on specs are in force, in order; the first is 0."""


def _at(in_force: SpecsByRound, round_: int) -> RunSpec:
    (_, spec), *later = in_force
    for from_round, amended in later:
        spec = amended if from_round <= round_ else spec
    return spec


def _end_round(in_force: SpecsByRound) -> int:
    round_ = 0
    while (total := _at(in_force, round_).total_rounds) > round_:
        ahead = (from_round for from_round, _ in in_force if from_round > round_)
        round_ = min([total, *ahead])
    return round_


class AmendedSpec:
    """The spec of a run, or of one of its experts, as the run has been amended so far.

    Attributes:
        founding: as the run was founded.
        amendments: in the order of their versions.
        last: the spec with all of them; `run` is the whole run's.
        models: the specs by which each of the experts ends, or by which the run does.
        longest_steps: no nominal step of the run is beyond, whoever has heard of which amendment.
    """

    def __init__(
        self, run: RunSpec, run_id: str = "", founder: bytes = b"", expert: int | None = None
    ) -> None:
        self._founded = run
        self._run_id = run_id
        self._founder = founder
        self._expert = expert
        self.founding = self.own(run)
        self._by_version: dict[int, Amendment] = {}
        self._take_stock()

    def of_expert(self, number: int) -> "AmendedSpec":
        other = AmendedSpec(self._founded, self._run_id, self._founder, number)
        other._by_version = dict(self._by_version)
        other._take_stock()
        return other

    def own(self, run: RunSpec) -> RunSpec:
        return run if self._expert is None else run.of_expert(self._expert)

    # --- what is in force -------------------------------------------------------------------------
    def at_round(self, round_: int) -> RunSpec:
        return _at(self._in_force, max(0, round_))

    def at_step(self, step: float) -> RunSpec:
        return self.at_round(int((step + EPSILON) // self.founding.sync.round_steps))

    def total_steps_at(self, step: float) -> int:
        """Nominal steps of the whole run, in whole rounds, by the spec in force at a step."""
        return self.at_step(step).total_rounds * self.founding.sync.round_steps

    def is_last_round(self, round_: int) -> bool:
        return self.at_round(round_).total_rounds == round_

    @property
    def longest_rounds(self) -> int:
        return self.longest_steps // self.founding.sync.round_steps

    @property
    def end_round(self) -> int:
        """The round at which the run is over, if nothing more is amended."""
        return _end_round(self._in_force)

    @property
    def next_version(self) -> int:
        return 1 + max(self._by_version, default=0)

    # --- what comes in ----------------------------------------------------------------------------
    def take(self, data: bytes) -> Amendment | None:
        """Keep an amendment that a member passes on; return it if it is new.

        Raises RemoteProtocolError: it is none of this run.
        """
        if any(data == known.sealed for known in self.amendments):
            return None  # signatures take time, and every new link brings all statements
        amendment = Amendment.read(data, self._run_id, self._founder, self._founded)
        before = self._by_version.get(amendment.version)
        if before is not None and _digest(before) <= _digest(amendment):
            return None
        self._by_version[amendment.version] = amendment
        self._take_stock()
        return amendment

    def _take_stock(self) -> None:
        ordered = tuple(self._by_version[version] for version in sorted(self._by_version))
        rounds = sorted({0, *(amendment.from_round for amendment in ordered)})
        runs = [(round_, spec_at(self._founded, ordered, round_)) for round_ in rounds]
        self.amendments = ordered
        self._in_force: SpecsByRound = [(round_, self.own(run)) for round_, run in runs]
        self.run, self.last = runs[-1][1], self._in_force[-1][1]
        numbers = range(len(self._founded.models))
        ways = [[(round_, run.models[number]) for round_, run in runs] for number in numbers]
        self.models = tuple(_at(way, _end_round(way)) for way in ways)
        longest = max(spec.total_rounds for _, spec in [(0, self.founding), *self._in_force])
        self.longest_steps = longest * self.founding.sync.round_steps


def _digest(amendment: Amendment) -> bytes:
    return blake3.blake3(amendment.sealed).digest()


# --- all that is signed of a run ------------------------------------------------------------------
def take_statement(
    statement: bytes, register: Register, amended: AmendedSpec, before: Successor | None = None
) -> Amendment | Successor | bool:
    """Keep a statement if it is new, and say what it is; False where it is not, or is refused.

    A successor is the caller's to keep; `before` is the one that it has.

    Raises RemoteProtocolError: it is no statement of this run.
    """
    if register.knows(statement) or (before is not None and statement == before.sealed):
        return False
    if is_successor(statement):
        named = Successor.read(statement, register.run_id)
        if not register.is_founder(named.signer):
            raise RemoteProtocolError("a successor that the founder has not named")
        return named if named.comes_after(before) else False
    if not is_amendment(statement):
        return register.take(statement)
    amendment = amended.take(statement)
    if amendment is None:
        return False
    register.mode = Mode(amended.last.admission.mode)
    return amendment
