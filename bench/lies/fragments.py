"""Peers that average fragments among all, some of which lie: the daemon's copy without its lines.

Each peer's side is the trainer's (peer/training/fragments.py); clipping and averaging, judging and
applying results are the daemon's (peer/averaging/diloco/averages.py, outer_fragments.py).
Every send arrives and comes back after tau steps, so all honest peers hold one outer copy, held
once. Chunks have the owners that the protocol gives them; a liar's codes that are not valid are
refused, as they are in peer/averaging/diloco/fragment_messages.py. A chunk whose result is not
plausible has no step in that cycle.

Where results are audited each honest peer draws as in protocol/diloco/audits.py, and owners open
what they have signed. A proof is with all at once: the results of that owner are not applied, and
it has no part in anything any more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import torch

from peer.averaging.diloco.averages import ChunkAverages
from peer.averaging.diloco.fragment_messages import signed_with
from peer.averaging.diloco.nesterov import NesterovFactors
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import codes_as_tensor, get_codec
from peer.network.identity import Identity
from peer.training.fragments import FragmentSnapshots
from peer.training.model import FlatModel
from peer.training.shared import CodeRegions
from protocol.diloco.commands import Admitted, Average, ResultArrived, WriteResults
from protocol.diloco.owners import owners_of_chunks
from protocol.fragment.fragments import fragments_of_run, sends_between
from protocol.limits import MAX_CONTRIBUTION_WEIGHT
from protocol.plausible import CLIP
from protocol.run.run_spec import RunSpec
from protocol.run.sections import DilocoSection
from protocol.wire.fragment_messages import Contribution, Result

from .arms import HostileArm
from .auditors import GROUP, Auditors, Made
from .figures import Figures
from .liars import Liars, Scene, rms
from .pieces import Pieces, view_of


class _WatchedAverages(ChunkAverages):
    """The daemon's averages, whose clipping can be looked at, or left out."""

    defended = True

    def __init__(self, identity: Identity, outer: OuterFragments, *, trims: bool) -> None:
        super().__init__(GROUP, identity.peer_id, 1, outer, identity.sign, trims=trims)
        self.shares: list[list[float]] = []

    def _shares(self, lengths: Sequence[float]) -> list[float]:
        found = super()._shares(lengths)
        self.shares.append(found if self.defended else [1.0] * len(lengths))
        return self.shares[-1]


class _WatchedFragments(OuterFragments):
    """The daemon's outer copy, whose judgement can be looked at, or left out."""

    defended = True

    def admit_result(self, fragment: int, result: ResultArrived, *, again: bool = False) -> bool:
        return super().admit_result(fragment, result, again=again) or not self.defended

    def reach(self, fragment: int, chunk: int) -> float:
        """The longest result that is applied."""
        return self._seen[fragment, chunk].bound(self._first_bound(fragment, chunk))


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    fragment: int
    cycle: int
    due_step: int


class FragmentSwarm:
    """Averages the weights of peers, the liars last; their training is the caller's."""

    def __init__(
        self,
        models: Sequence[FlatModel],
        spec: RunSpec,
        arm: HostileArm,
        identities: Sequence[Identity],
    ) -> None:
        """All models hold the same weights."""
        diloco = DilocoSection()
        self.figures = Figures()
        self._spec, self._arm = spec, arm
        self._codec = get_codec(spec.sync.codec)
        self._fragments = fragments_of_run(diloco, models[0].layout)
        self._pieces = [
            Pieces(self._codec, [stop - start for start, stop in fragment.chunks])
            for fragment in self._fragments
        ]
        self._names = [identity.peer_id for identity in identities[: len(models)]]
        self._last_cycle = spec.training.total_steps // spec.sync.round_steps
        phi_P = models[0].theta_P.detach().numpy().copy()
        self.phi_P = torch.from_numpy(phi_P)
        self._outer = _WatchedFragments(
            self._fragments,
            phi_P,
            phi_P * 0,
            self._codec,
            NesterovFactors(diloco.learning_rate, diloco.momentum),
            lambda cycle: cycle == self._last_cycle,
        )
        self._averages = _WatchedAverages(identities[0], self._outer, trims=arm.trims)
        self._outer.defended = self._averages.defended = arm.defence == "on"
        self._stamps = self._outer.first_stamps()
        self._overlap_steps = diloco.overlap_steps
        sizes = [self._codec.code_bytes(fragment.size) for fragment in self._fragments]
        self._replicas = [
            FragmentSnapshots(
                model,
                self.phi_P,
                CodeRegions(-1, sizes, writable=True),
                self._codec,
                self._fragments,
                1.0 - diloco.merge,
            )
            for model in models
        ]
        self._liars = Liars(arm.attack, spec.seed)
        self._auditors = Auditors(identities[: arm.honest], self._names, self._outer)
        self._identities = identities
        self._on_their_way: list[_OnItsWay] = []

    def after_step(self, step: int) -> None:
        """Send what is due after this inner step (the first is 1), and take in what is back."""
        count, inner_steps = len(self._fragments), self._spec.sync.round_steps
        for fragment, cycle in sends_between(step - 1, step, count, inner_steps):
            self._send(fragment, cycle)
            self._on_their_way.append(_OnItsWay(fragment, cycle, step + self._overlap_steps))
        self._take_in(step)

    def settle(self) -> None:
        """Take in what is on its way, then send all once more: the plain average at the end."""
        self._take_in(None)
        for fragment in range(len(self._fragments)):
            self._send(fragment, self._last_cycle)
            self._average(fragment, self._last_cycle)

    def judged(self) -> list[torch.Tensor]:
        """Slow weights of the honest peers: all have the same."""
        return [self.phi_P]

    def _send(self, fragment: int, cycle: int) -> None:
        for replica in self._replicas:
            replica.send(fragment, cycle)
        self._outer.sends(fragment, self._replicas[0].codes(fragment))

    def _take_in(self, step: int | None) -> None:
        for sent in tuple(self._on_their_way):
            if step is None or sent.due_step <= step:
                self._on_their_way.remove(sent)
                self._average(sent.fragment, sent.cycle)

    def _average(self, fragment: int, cycle: int) -> None:
        chunks = range(len(self._fragments[fragment].chunks))
        codes = self._contributions(fragment)
        names = [name for name in self._names if name not in self._auditors.convicted]
        owners = owners_of_chunks(f"{GROUP}/{fragment}/{cycle}", len(chunks), names)
        made = self._averaged(fragment, cycle, codes)
        results = {} if made is None else dict(made.averages.parts)
        for chunk in chunks:
            if chunk in results and self._is_liar(self._names.index(owners[chunk])):
                results[chunk] = self._owned(fragment, chunk, results[chunk])
        if made is not None and self._arm.audited:
            results = self._auditors.without_lies(made, owners, results, self._identities)
        stepped = [] if made is None else self._written(made.averages.result, results)
        for chunk in chunks:
            if chunk not in stepped:
                self.figures.note_lost(by_liar=self._is_liar(self._names.index(owners[chunk])))
        for replica in self._replicas:
            replica.merge(fragment, stepped)

    def _contributions(self, fragment: int) -> dict[str, memoryview]:
        """The codes of each peer that are taken."""
        pieces = self._pieces[fragment]
        true = [codes_as_tensor(replica.codes(fragment)) for replica in self._replicas]
        liars = [index for index in range(len(true)) if self._is_liar(index)]
        moves = [-pieces.decoded(codes) for codes in true] if liars else []
        for liar in liars:
            true[liar] = self._lie(fragment, liar, moves)
        return {
            self._names[index]: view_of(codes)
            for index, codes in enumerate(true)
            if pieces.are_valid(codes) and self._names[index] not in self._auditors.convicted
        }

    def _lie(self, fragment: int, liar: int, moves: Sequence[torch.Tensor]) -> torch.Tensor:
        """A liar's codes; a vector is let through up to where it is clipped."""
        honest = moves[: self._arm.honest]
        usual = median_low(sorted(map(rms, honest)))
        scene = Scene(fragment, moves[liar], honest, CLIP.largest * usual)
        values = -self._liars.lied_move(scene)
        return self._liars.lied_codes((liar, fragment), values, self._pieces[fragment])

    def _averaged(self, fragment: int, cycle: int, codes: Mapping[str, memoryview]) -> Made | None:
        """The averages that honest owners make, and of what."""
        parts = {
            name: self._outer.split_codes(
                fragment, range(len(self._fragments[fragment].chunks)), each
            )
            for name, each in codes.items()
        }
        contributors = tuple(sorted(codes))
        order = Average(
            fragment,
            cycle,
            {
                chunk: Admitted(stamp, contributors)
                for chunk, stamp in enumerate(self._stamps[fragment])
            },
            {
                chunk: {name: part[chunk] for name, part in parts.items()}
                for chunk in range(len(self._stamps[fragment]))
            },
            {name: self._told(fragment, cycle, name, part) for name, part in parts.items()},
        )
        self._averages.shares.clear()
        made = self._averages.averaged(order)
        self._note_shares(contributors)
        return None if made is None else Made(order, made)

    def _told(
        self, fragment: int, cycle: int, name: str, parts: Mapping[int, memoryview]
    ) -> Contribution:
        """What a peer signs of its codes."""
        stamps = tuple(self._stamps[fragment])
        weight, signature = MAX_CONTRIBUTION_WEIGHT, bytes(64)
        unsigned = Contribution(GROUP, fragment, cycle, weight, 1, 1, stamps, (), (), signature)
        sign = self._identities[self._names.index(name)].sign
        return signed_with(unsigned, parts, self._outer, sign)

    def _owned(self, fragment: int, chunk: int, result: memoryview) -> memoryview:
        """What a liar signs in the place of the average."""
        piece = Pieces(self._codec, [self._outer.chunk_values(fragment, chunk)])
        mean = piece.decoded(codes_as_tensor(result))
        lie = self._liars.owned_average(mean, self._outer.reach(fragment, chunk))
        return result if lie is mean else view_of(piece.encoded(lie))

    def _written(self, result: Result, codes: Mapping[int, memoryview]) -> list[int]:
        """Apply a result with these codes, of which some may be lies; the chunks that stepped."""
        fragment = result.fragment
        parts = tuple(
            ResultArrived(result, of_chunk, codes[of_chunk.chunk], result.owner)
            for of_chunk in result.chunks
            if of_chunk.chunk in codes
        )
        stamps = self._outer.carry_out(WriteResults(fragment, parts, frozenset(), 0.0))
        for chunk, stamp in stamps.items():
            self._stamps[fragment][chunk] = stamp
        return list(stamps)

    def _note_shares(self, contributors: Sequence[str]) -> None:
        for shares in self._averages.shares:
            by_peer = zip(map(self._names.index, contributors), shares, strict=True)
            weight = 0.0
            for index, share in by_peer:
                if self._is_liar(index):
                    weight += share
                else:
                    self.figures.note_honest(share)
            self.figures.note_averaged(weight / max(1e-30, sum(shares)))

    def _is_liar(self, index: int) -> bool:
        return self._arm.liars > 0 and index >= self._arm.honest
