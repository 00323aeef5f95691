"""`loco-peer eval`: what each rule of combination makes of a run's experts, on each domain.

The daemon asks one peer of each expert for the log-probabilities of the true tokens of all domains'
held-out blocks; the rules are computed here, exactly, from these alone. A peer may lie. What is no
logarithm of a probability is refused by the daemon; with `--check` the weights of each expert's
peer are fetched too, and a block of each domain, which the peer cannot foresee, is computed with
them. Without that, or where its weights have moved on since, it is said that nothing was checked.
"""

import json
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from peer.observe.control import ControlFailed, NoDaemon, NotNow
from peer.options.config import ConfigError
from peer.process.bottom_line import shown
from peer.state.home import Home
from protocol.errors import LocoError
from protocol.experts.claims import Values
from protocol.experts.ensemble import RUN, Combination, compare, rules_of
from protocol.experts.matrix import lines_of_table
from protocol.names import short_id
from protocol.run.run_spec import NONE, RunSpec
from protocol.schedule.progress import TaskProgress, Tell

from .client import SLOW_S, ask_now, run_of

OURS: Final = "ours"
UNCHECKED: Final = "not checked: its weights are not here; --check fetches them"
BEST: Final = "best expert"


@dataclass(slots=True)
class ExpertSaid:
    """The answer of a peer of an expert.

    Attributes:
        claims: log-probabilities by domain; stamps of the weights beside them.
        check: what came of checking it, in words.
        believed: None where it could not be checked.
    """

    name: str
    peer_id: str | None
    step: int | None
    claims: Mapping[int, Values]
    stamps: Mapping[int, str]
    check: str
    believed: bool | None = None


@dataclass(frozen=True, slots=True)
class DomainSaid:
    """Losses of experts and rules on one domain; `alone` by the expert's name."""

    name: str
    tokens: int
    alone: Mapping[str, float]
    together: Mapping[str, float]


# --- asking ---------------------------------------------------------------------------------------
def said_of(home: Home, number: int, name: str) -> ExpertSaid:
    """Raises NoDaemon, NotNow: the daemon cannot ask now."""
    try:
        reply = ask_now(home, "expert_claims", SLOW_S, expert=number)
    except (NoDaemon, NotNow):
        raise
    except ControlFailed as error:
        return ExpertSaid(name, None, None, {}, {}, f"nobody told: {error}")
    claims = {int(domain): claim for domain, claim in reply["claims"].items()}
    return ExpertSaid(
        name,
        reply["peer"],
        max((claim["step"] for claim in claims.values()), default=None),
        {n: np.frombuffer(b64decode(each["log_probs"]), "<f4") for n, each in claims.items()},
        {number: claim["stamp"] for number, claim in claims.items()},
        OURS if reply["own"] else UNCHECKED,
        True if reply["own"] else None,
    )


# --- the rules ------------------------------------------------------------------------------------
def own_rule(spec: RunSpec) -> Combination:
    ensemble = spec.ensemble
    assert ensemble is not None
    return Combination(ensemble.discount, ensemble.fixed_share, ensemble.top)


def answering(spec: RunSpec, said: Sequence[ExpertSaid]) -> list[ExpertSaid]:
    """The experts of the ensemble: not the generalist where it is no anchor, and no liar."""
    ensemble = spec.ensemble
    assert ensemble is not None
    first = 1 if ensemble.anchor == NONE else 0
    return [each for each in said[first:] if each.believed is not False]


def domains_of(spec: RunSpec, said: Sequence[ExpertSaid]) -> Iterator[DomainSaid]:
    """Losses of the experts that answer on each domain, alone and together."""
    context, rules = spec.model.context_length, rules_of(own_rule(spec))
    for number, domain in enumerate(spec.experts):
        alone = {e.name: e.claims[number] for e in said if number in e.claims}
        chosen = [each for each in answering(spec, said) if number in each.claims]
        if not alone:
            continue
        losses = {name: -float(claim.mean(dtype=np.float64)) for name, claim in alone.items()}
        together: Mapping[str, float] = {}
        if chosen:
            blocks = np.stack([each.claims[number] for each in chosen])
            together = compare(blocks.reshape(len(chosen), -1, context), rules)
        tokens = next(iter(alone.values())).size
        yield DomainSaid(domain.name, tokens, losses, together)


# --- showing --------------------------------------------------------------------------------------
def show_evaluation(home: Home, *, check: bool, as_json: bool) -> None:
    """Raises HomeError, ConfigError, NoDaemon, NotNow; LocoError: nobody told anything."""
    spec = run_of(home)
    if not spec.experts:
        raise ConfigError("this run has no experts: its loss is the held-out loss in `status`")
    with shown("asking the experts") as tell:
        said = list(_ask_all(home, spec, tell))
        if check:
            from .expert_check import check_claims  # imports torch

            check_claims(home, spec, said, tell)
        tell(TaskProgress("computing the rules"))
        domains = list(domains_of(spec, said))
    if not domains:
        raise LocoError("no expert has measured a domain yet; try again after a validation")
    numbers = {expert.name: number for number, expert in enumerate(spec.experts)}
    losses = {numbers[d.name]: d.together[RUN] for d in domains if RUN in d.together}
    ask_now(home, "keep_together", losses=losses)
    if as_json:
        print(json.dumps(evaluation_json(said, domains)))
    else:
        print(*lines_of(said, domains), sep="\n")


def _ask_all(home: Home, spec: RunSpec, tell: Tell) -> Iterator[ExpertSaid]:
    for number, expert in enumerate(spec.experts):
        tell(TaskProgress("asking the experts", number, len(spec.experts), "experts"))
        yield said_of(home, number, expert.name)


def evaluation_json(said: Sequence[ExpertSaid], domains: Sequence[DomainSaid]) -> dict[str, Any]:
    return {
        "experts": [
            {
                "name": each.name,
                "peer": each.peer_id,
                "step": each.step,
                "believed": each.believed,
                "check": each.check,
            }
            for each in said
        ],
        "domains": [
            {**asdict(each), "best": min(each.alone, key=each.alone.__getitem__)}
            for each in domains
        ],
    }


def lines_of(said: Sequence[ExpertSaid], domains: Sequence[DomainSaid]) -> Iterator[str]:
    """The table for people: a line for each expert and rule, a star for the best of a column."""
    rules = next((tuple(each.together) for each in domains if each.together), ())
    found = [{**each.alone, **each.together, BEST: min(each.alone.values())} for each in domains]
    names = [*(each.name for each in said), BEST, *rules]
    rows = [(name, [losses.get(name) for losses in found]) for name in names]
    yield from lines_of_table([each.name for each in domains], rows)
    yield ""
    for each in said:
        by = "" if each.peer_id is None else f"peer {short_id(each.peer_id)}, step {each.step}: "
        yield f"{each.name}: {by}{each.check}"
