"""The first weights of an expert that begins from a checkpoint, which only the founder has.

As with `model.init_from` of a run of one model, the founder gives them to others; but it trains
another expert, perhaps. So it keeps them in its home as they were when the run was founded, and
serves them as the state of the expert's group before its first round, until somebody trains it. The
signed run spec names their digest, so nobody else's are believed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import blake3
import numpy as np

from peer.content.fetching import ExpectedState, Fetcher, whole_state
from peer.content.service import WrittenState
from peer.content.state_file import StateManifest, write_state
from peer.observe.event_names import EventName
from peer.runtime import Work
from protocol.content.samples import Float32Vector
from protocol.errors import RemoteProtocolError
from protocol.membership.group import Group
from protocol.run.layout import part_of_expert
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.wire.content_messages import StateScalars

from .beginning import NOTHING_TRAINED, Arrival, FirstState
from .experts import has_begun
from .fetched import Fetched
from .sources import DOUBT_PAUSE_S, NobodyHelped


def weights_file(state_dir: Path, number: int) -> Path:
    """Where the founder keeps those of an expert that begins from a checkpoint."""
    return state_dir / f"first-weights-{number}.f32"


def digest_of_weights(slow_P: Float32Vector) -> str:
    return blake3.blake3(slow_P.astype("<f4", copy=False).data.cast("B")).hexdigest()


def kept_first_weights(run: RunSpec, state_dir: Path) -> dict[int, Path]:
    """Those that are here, by the expert's number."""
    paths = {number: weights_file(state_dir, number) for number in range(len(run.experts))}
    return {number: path for number, path in paths.items() if path.is_file()}


def first_states(
    signed: SignedSpec, kept: Mapping[int, Path], work: Work
) -> dict[str, WrittenState]:
    """Those that are kept, as states of their groups, by the group's digest."""
    found, run = dict[str, WrittenState](), signed.spec()
    for number, path in kept.items():
        frozen = run.experts[number].frozen
        assert frozen is not None, "the run was founded"
        group = Group(signed.run_id, part_of_expert(number)).digest
        found[group] = FirstWeights(group, path, frozen.layout_digest, work)
    return found


@dataclass(frozen=True)
class FirstWeights:
    """The state of a group before its first round. Implements `WrittenState`."""

    group: str
    path: Path
    layout_digest: str
    work: Work
    round = -1
    step = 0

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        slow_P: Float32Vector = await self.work.run(np.fromfile, self.path, "<f4")
        path = directory / "first.state"
        scalars = StateScalars(
            group=self.group,
            round=self.round,
            step=self.step,
            layout_digest=self.layout_digest,
            epoch=0,
            position=0,
            tokens=0,
            gradient_norm=0.0,
        )
        momentum_P = np.zeros_like(slow_P)
        return path, await self.work.run(write_state, path, scalars, slow_P, momentum_P)


class FromFounder:
    """First weights that the founder gives; it is waited for, and that is told.

    Where a peer of the expert has come meanwhile, its state is taken.
    """

    ages = False

    async def take(self, arrival: Arrival) -> FirstState:
        ports, told = arrival.ports, False
        expected = ExpectedState(arrival.held.group.digest, maximum_step=0)

        async def ask(fetcher: Fetcher) -> StateScalars:
            state = await whole_state(fetcher, expected, arrival.slow_P, arrival.momentum_P)
            await _check_signed(arrival)
            return state

        while True:
            ports.facts.now_doing("asking for the first weights of this expert")
            try:
                await arrival.sources.fetch(ask, ports.roster, patience_s=DOUBT_PAUSE_S)
            except NobodyHelped:
                if not told:
                    ports.events.emit(EventName.FIRST_WEIGHTS_MISSING, expert=ports.facts.expert)
                told = True
                if has_begun(arrival.held.view):
                    return await Fetched().take(arrival)
            else:
                return NOTHING_TRAINED


async def _check_signed(arrival: Arrival) -> None:
    """Raises RemoteProtocolError: the vectors, zeros again then, are not what the founder signed.

    Runs that were founded by earlier versions name no digest.
    """
    frozen, ports = arrival.spec.founding.frozen, arrival.ports
    signed = None if frozen is None else frozen.weights
    is_it = signed in (None, await ports.work.run(digest_of_weights, arrival.slow_P))
    if not is_it or arrival.momentum_P.any():
        arrival.slow_P[:] = arrival.momentum_P[:] = 0.0
        raise RemoteProtocolError("these are not the first weights that the founder signed")
