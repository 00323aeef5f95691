"""The status of a peer, for `loco-peer status`, the console, metrics and the demo."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec

from peer.facts import RECENT_ROUNDS, PeerState
from protocol.membership.group import WHOLE_MODEL
from protocol.names import LISTED, duration, short_id
from protocol.outcomes import SkipReason
from protocol.routing.measures import LinkTimes
from protocol.run.amendments import AmendedSpec

from .experts import matrix_lines
from .problems import PeerProblem

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# --- amendments -----------------------------------------------------------------------------------


def amendments_json(spec: AmendedSpec | None) -> tuple[dict[str, Any], ...]:
    """Plain values, in the order of versions; none while the run is not known."""
    if spec is None:
        return ()
    steps = spec.founding.sync.round_steps
    return tuple(
        {
            "version": amendment.version,
            "round": amendment.from_round,
            "step": amendment.from_round * steps,
            "changes": dict(amendment.changes),
        }
        for amendment in spec.amendments
    )


def amendment_lines(amendments: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{each['version']}, from round {each['round']:,} (step {each['step']:,}) on: "
        + ", ".join(f"{key} = {value}" for key, value in each["changes"].items())
        for each in amendments
    ]


def successor_lines(successor: Mapping[str, str] | None) -> list[str]:
    return [] if successor is None else [f"{successor['run_id']}, at {successor['address']}"]


# --- lines of pipelines ---------------------------------------------------------------------------


def pipeline_lines(pipeline: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values that are known, of what `PipelineFacts.to_json` writes."""
    apart = pipeline.get("replicas_apart")
    lines = {
        "iteration": _iteration(pipeline),
        "time in": _spent(pipeline.get("spent_s", {})),
        "paths": _paths(pipeline.get("paths", ())),
        "links": _links(pipeline.get("links", ())),
        "replicas": "" if apart is None else f"{apart:.2%} apart at the last average in this stage",
    }
    return [(name, value) for name, value in lines.items() if value]


def _iteration(pipeline: Mapping[str, Any]) -> str:
    planned, measured = pipeline.get("planned_s"), pipeline.get("iteration_s")
    said = [] if measured is None else [f"{measured:.2f} s"]
    if planned:
        said.append(f"planned {planned:.2f} s (plan {pipeline['plan'][:8]})")
    return ", ".join(said)


def _spent(spent_s: Mapping[str, float]) -> str:
    total_s = sum(spent_s.values())
    return ", ".join(f"{what} {s / total_s:.0%}" for what, s in spent_s.items()) if total_s else ""


def _paths(paths: tuple[str, ...]) -> str:
    said = [f"{path} ({times}x)" for path, times in Counter(paths).most_common(LISTED)]
    return "; ".join(said)


def _links(told: tuple[Mapping[str, Any], ...]) -> str:
    links = [link for link in (LinkTimes(**each) for each in told) if link.out_us]
    slowest = sorted(links, key=lambda link: -link.rtt_us - link.out_us)[:LISTED]
    return "; ".join(
        f"{short_id(link.peer_id)} {1e-3 * link.rtt_us:.1f} + {1e3 * link.out_s:.1f} ms"
        for link in slowest
    )


def reach_line(told: Mapping[str, Any]) -> str:
    """A line for people, of what `ReachFacts.to_json` writes."""
    families = ", ".join(f"IP{name} {told[name]}" for name in ("v4", "v6"))
    line = f"{told['reachable']} ({families}; router: {told['nat']})"
    if told["relays"]:
        line += f"; relayed by {', '.join(map(short_id, told['relays']))}"
    if told["relayed_peers"]:
        line += f"; {told['relayed_peers']} peers through relays"
    if told["circuits"] or told["reservations"]:
        line += f"; relays {told['circuits']} connections for {told['reservations']} peers"
    return line


# --- status ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Rounds that ended since this daemon started, and `Facts.averaged_share`."""

    averaged: int = 0
    skipped: Mapping[SkipReason, int] = field(default_factory=dict)
    recent_share: float | None = None


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another peer, as we see it.

    Attributes:
        round, step: the last that it told us of. With gossip a peer numbers its rounds for itself,
            so only nominal steps compare.
        rtt_s: smoothed round-trip time.
        validation_loss: as it says, nats per token.
        averages: rounds that it was our partner in, since this daemon started.
        average_s: how long the exchange took in them, on average.
    """

    peer_id: str
    state: str
    round: int | None = None
    rtt_s: float | None = None
    step: int | None = None
    validation_loss: float | None = None
    averages: int = 0
    average_s: float | None = None


@dataclass(frozen=True, slots=True)
class ExpertStatus:
    """One of several models of a run.

    Attributes:
        peers: that train it.
        step: nominal, as those say; where nobody trains it, as they said last.
        stands: it is not trained to its end, and nobody goes on with it.
    """

    name: str
    peers: int
    step: int
    total_steps: int
    stands: bool

    def __str__(self) -> str:
        how = f"{self.peers} peers" if self.peers != 1 else "1 peer"
        how = "stands, nobody trains it" if self.stands else how
        return f"{self.name}: step {self.step:,} of {self.total_steps:,}, {how}"


@dataclass(frozen=True, slots=True)
class Status:
    """The status of this peer. None is unknown.

    Attributes:
        step, total_steps: nominal.
        learning_rate: at this step, without the warm-up of a trainer that began late.
        tokens_per_s: of this peer; None where it holds a stage of a pipeline.
        swarm_tokens_per_s: of all that train, by what they tell of their speed.
        left_s: to the end of the run, at the pace of the last minutes.
        chosen_inner_steps: of our rounds, where each peer chooses its own; None where the run says.
        tokens: trained by this peer, in its life before the last checkpoint too.
        train_loss: mean of the last round, nats per token.
        validation_loss: of the slow weights on the run's fixed blocks, nats per token; at a relay
            of a pipeline the middle one of what the data peers tell.
        replica_loss: what it was before the final averaging, where that has begun: then the
            slow weights become the mean of all.
        metrics: URL of the Prometheus endpoint.
        part: of the model that this peer holds, `model`, `stage/N` or `expert/N`.
        expert: the name of that one.
        experts: all of the run.
        matrix: `ExpertBoard.matrix`.
        microbatches: what has happened to them here, where the part is a stage.
        pipeline: `PipelineFacts.to_json`, there.
        amendments: `amendments_json`.
        successor: `run_id` and `address` of the run that the founder has named to follow.
        ranks: processes of this machine that train as one (`--gpus`).
        codec: of the run, and whether plain or compiled loops code with it here.
        reach: `ReachFacts.to_json`.
        address: what others join by.
        address_from: where it was named, such as `command line`; None where nobody has named it.
        reachable_from: `anywhere`, `this network` or `this machine`.
        doing: one short sentence on what is going on, or what we wait for.
        since_s: since `doing` last changed.
        problems: what is wrong.
        up_s: since this daemon started.
        price_per_hour: of this machine, as its owner says.
        seconds: what time went into since then; some of it passes at once (`Facts.seconds`).
    """

    peer_id: str | None = None
    run_id: str | None = None
    state: PeerState = PeerState.STARTING
    round: int | None = None
    step: int | None = None
    total_steps: int | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    swarm_tokens_per_s: float | None = None
    left_s: float | None = None
    chosen_inner_steps: int | None = None
    tokens: int | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    replica_loss: float | None = None
    outcomes: Outcomes = Outcomes()
    peers: tuple[PeerStatus, ...] = ()
    metrics: str | None = None
    part: str | None = None
    expert: str | None = None
    experts: tuple[ExpertStatus, ...] = ()
    matrix: Mapping[str, Any] | None = None
    microbatches: Mapping[str, int] = field(default_factory=dict)
    pipeline: Mapping[str, Any] | None = None
    amendments: tuple[Mapping[str, Any], ...] = ()
    successor: Mapping[str, str] | None = None
    ranks: int | None = None
    codec: str | None = None
    reach: Mapping[str, Any] | None = None
    address: str | None = None
    address_from: str | None = None
    reachable_from: str | None = None
    doing: str | None = None
    since_s: float | None = None
    problems: tuple[PeerProblem, ...] = ()
    up_s: float | None = None
    price_per_hour: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))  # no NaN comes out
        skipped = tree["outcomes"]["skipped"]
        tree["outcomes"]["skipped"] = {reason: count for reason, count in skipped.items() if count}
        return tree

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Raises ValueError."""
        return msgspec.convert(tree, cls)

    @property
    def page(self) -> str | None:
        """URL of the web page of this peer."""
        return None if self.metrics is None else self.metrics.removesuffix("metrics")

    @property
    def trainers(self) -> int:
        """Peers that train, this one among them; where it does not train, all that are known."""
        trains = self.state is PeerState.TRAINING
        return 1 + sum(not trains or peer.state == PeerState.TRAINING for peer in self.peers)


# --- lines for people -----------------------------------------------------------------------------


def progress_line(now: Status, *, losses: bool) -> str:
    """Such as `step 110 of 1,200 (9%), loss 2.31, 2,900 tokens/s (swarm 8,400), 4 peers`."""
    parts = ["step -"]
    if now.step is not None and now.total_steps:
        share = min(1.0, now.step / now.total_steps)
        parts = [f"step {now.step:,} of {now.total_steps:,} ({share:.0%})"]
    if losses and now.train_loss is not None:
        held_out = "" if now.validation_loss is None else f" (held out {now.validation_loss:.2f})"
        parts.append(f"loss {now.train_loss:.2f}{held_out}")
    if now.tokens_per_s is not None:
        swarm = "" if (all_s := now.swarm_tokens_per_s) is None else f" (swarm {all_s:,.0f})"
        parts.append(f"{now.tokens_per_s:,.0f} tokens/s{swarm}")
    if now.left_s is not None:
        parts.append(f"{duration(now.left_s)} left")
    parts.append("1 peer" if now.trainers == 1 else f"{now.trainers} peers")
    return ", ".join(parts)


def cost_line(now: Status) -> str:
    """Such as `1.24 so far, 3.10 at the end of the run (0.400 an hour)`."""
    if now.price_per_hour is None or now.up_s is None:
        return ""
    so_far, end = (now.price_per_hour * s / 3600 for s in (now.up_s, now.up_s + (now.left_s or 0)))
    later = "" if now.left_s is None else f", {end:,.2f} at the end of the run"
    return f"{so_far:,.2f} so far{later} ({now.price_per_hour:.3g} an hour)"


def health_of(status: Status, *, founder: bool) -> tuple[bool, str]:
    """Whether this peer does its part, and a sentence on that; a daemon that answers is alive.

    One that founded its run may train alone: it waits for others. Another has lost them.
    """
    told = _state(status)
    if status.state in (PeerState.CONNECTING, PeerState.RETURNING):
        return False, f"alive, but it has not found its run: {told.partition(': ')[2] or told}"
    if status.state is PeerState.TRAINING and not status.peers and not founder:
        return False, "alive, but it trains alone, and others of its run are not linked"
    return True, f"works: {told}, other peers: {len(status.peers)}"


def render(status: Status, *, full_ids: bool = False) -> "RenderableType":
    from rich.console import Group

    about = pairs_table(_lines(status))
    if not status.peers:
        return about
    peers = columns_table("peer", "state", "step", "validation", "rtt")
    for peer in status.peers:
        rtt = "-" if peer.rtt_s is None else f"{peer.rtt_s * 1000:.1f} ms"
        name = peer.peer_id if full_ids else short_id(peer.peer_id)
        loss = loss_text(peer.validation_loss)
        peers.add_row(name, str(peer.state), number_text(peer.step), loss, rtt)
    return Group(about, peers)


def pairs_table(rows: Iterable[tuple[str, str]]) -> "Table":
    from rich.table import Table  # rich is slow to import, and only this needs it
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    return table


def columns_table(*names: str) -> "Table":
    from rich.table import Table

    return Table(*names, box=None, header_style="bold", padding=(0, 2, 0, 0))


def _lines(status: Status) -> list[tuple[str, str]]:
    rate = "" if (r := status.learning_rate) is None else f", learning rate {r:.3g}"
    chosen = "" if (h := status.chosen_inner_steps) is None else f"  inner steps {h:,} (auto)"
    notes = [status.address_from] if status.address_from else []
    if status.reachable_from not in (None, "anywhere"):
        notes.append(f"only reachable from {status.reachable_from}")
    note = f"  ({'; '.join(notes)})" if notes else ""
    trained, validated = map(loss_text, (status.train_loss, status.validation_loss))
    before = "" if (own := status.replica_loss) is None else f"  before the mean {loss_text(own)}"
    return [
        ("peer", status.peer_id or "-"),
        ("run", status.run_id or "-"),
        ("state", _state(status)),
        *(("wrong", each.line) for each in status.problems),
        ("progress", progress_line(status, losses=False) + rate),
        ("round", f"{number_text(status.round)}{chosen}"),
        ("tokens", number_text(status.tokens)),
        *(("cost", cost) for cost in [cost_line(status)] if cost),
        ("loss", f"train {trained}  validation {validated}{before}"),
        ("rounds", rounds_line(status.outcomes)),
        *(("amended", line) for line in amendment_lines(status.amendments)),
        *(("successor", line) for line in successor_lines(status.successor)),
        *_part(status),
        *_experts(status),
        ("codec", status.codec or "-"),
        ("reachable", "-" if status.reach is None else reach_line(status.reach)),
        ("address", (status.address or "-") + note),
        ("page", f"{status.page}  (in a terminal: loco-peer top)" if status.page else "-"),
        ("metrics", status.metrics or "-"),
    ]


def _state(status: Status) -> str:
    since = "" if status.since_s is None else f" ({status.since_s:.0f} s)"
    return f"{status.state}: {status.doing}{since}" if status.doing else str(status.state)


def _part(status: Status) -> list[tuple[str, str]]:
    if status.expert is not None:
        others = (("", str(each)) for each in status.experts)
        return [("expert", status.expert), *others]
    if status.part is None or status.part == WHOLE_MODEL:
        return []
    counted = ", ".join(f"{what} {n:,}" for what, n in status.microbatches.items() if n)
    return [
        ("holds", f"{status.part}; microbatches: {counted or 'none'}"),
        *pipeline_lines(status.pipeline or {}),
    ]


def _experts(status: Status) -> list[tuple[str, str]]:
    if status.matrix is None:
        return []
    return [("losses", "\n".join(matrix_lines(status.matrix)))]


def rounds_line(outcomes: Outcomes) -> str:
    skipped = ", ".join(f"{reason} {n}" for reason, n in outcomes.skipped.items() if n)
    counted = f"{outcomes.averaged} averaged; skipped: {skipped or 'none'}"
    share = outcomes.recent_share
    recently = "" if share is None else f"; {share:.0%} of the last {RECENT_ROUNDS} averaged"
    return counted + recently


def number_text(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def loss_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
