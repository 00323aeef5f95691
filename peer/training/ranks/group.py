"""Several processes of one machine, the ranks, that train one model: flat ZeRO-2.

Theory (arXiv 1910.02054). Each rank has all weights and all gradients, and the optimizer's moments
of its own span of the flat vector alone. A step:

    backward on the rank's own sequences        weighed by targets, so shares may be unequal; or
                                                on its part of each (context.py)
    reduce                                      the sum of a span's gradients goes to its rank
    clip                                        by the norm of all spans
    optimizer on the own span
    share                                       every span goes from its rank to all

Rank 0 is the process that the daemon has started. It alone has the round machine, the slow weights
and the codes, so the daemon, and all other peers, see one trainer and one vector. The others obey:
rank 0 broadcasts a `RankOrder` before all that ranks do together, so all call the same collectives
between the same two steps. When something else has moved rank 0's weights (`Load`, a merge) they go
to all with the next step (`FlatModel.moved`).

A collective waits for as long as it takes: one bound for a trainer that hangs, the daemon's, is
enough (peer/training/process.py). The end of one rank is that of all
(peer/training/child/followers.py).
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum, auto
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from peer.runtime.child_process import STOP_GRACE_S

from .spans import shared_part

FOREVER: Final = timedelta(days=365)
ORDER_NUMBERS: Final = 6
"""Numbers of an order: which, and up to five of its own."""


class RankOrder(IntEnum):
    STEP = auto()
    FORGET = auto()
    GIVE_MOMENTS = auto()
    TAKE_MOMENTS = auto()
    GIVE_WEIGHTS = auto()
    LOSS = auto()
    LOG_PROBS = auto()


class Ranks:
    """The ranks as one of them sees them; one alone says nothing to anybody.

    Attributes:
        divide_sequences: whether each has a part of every sequence, and not some sequences.
    """

    def __init__(self, rank: int = 0, count: int = 1, *, divide_sequences: bool = False) -> None:
        self.rank, self.count = rank, count
        self.divide_sequences = divide_sequences and count > 1
        self._apart = count == 1

    @classmethod
    def join(
        cls, rank: int, count: int, device: torch.device, store_fd: int, *, divide_sequences: bool
    ) -> Self:
        """Meet the others; the descriptor is of memory that all have."""
        # Whoever reaches these ports could write gradients: only this machine does.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        backend = "cpu:gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend += ",cuda:nccl"
        distributed.init_process_group(
            backend,
            store=FileStore(f"/proc/self/fd/{store_fd}", count),
            rank=rank,
            world_size=count,
            timeout=FOREVER,
        )
        ranks = cls(rank, count, divide_sequences=divide_sequences)
        ranks.sum(torch.zeros(1, device=device))  # takes what memory collectives need
        return ranks

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Do in this block all for oneself, on one's own share."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    # --- orders -----------------------------------------------------------------------------------
    def tell(self, order: RankOrder, *numbers: float) -> None:
        """Have the other ranks do what rank 0 does now; they have been told."""
        if self.rank == 0 and not self._apart:
            told = torch.zeros(ORDER_NUMBERS, dtype=torch.float64)
            told[: 1 + len(numbers)] = torch.tensor([float(order), *numbers], dtype=torch.float64)
            self.spread(told)

    def next_order(self) -> tuple[RankOrder, list[float]]:
        told = torch.zeros(ORDER_NUMBERS, dtype=torch.float64)
        self.spread(told)
        order, *numbers = told.tolist()
        return RankOrder(int(order)), numbers

    def share_of(self, blocks_BT: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Our share of these sequences."""
        if self.divide_sequences:
            return blocks_BT  # the model takes its part of each
        return np.array_split(blocks_BT, self.count)[self.rank]

    # --- collectives ------------------------------------------------------------------------------
    def _do(self, collective: Callable[..., object], *given: Any, **named: Any) -> Any:
        """Call it, as all ranks do; apart, nothing.

        Where it breaks another rank has died: that one is told of, and not this error.
        """
        if self._apart:
            return None
        try:
            return collective(*given, **named)
        except RuntimeError:
            time.sleep(STOP_GRACE_S)  # rank 0 sees it die, and ends this process, within that
            raise

    def spread(self, tensor: torch.Tensor) -> None:
        """Give all what rank 0 has."""
        self._do(distributed.broadcast, tensor, src=0)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self._do(distributed.all_reduce, tensor)
        return tensor

    def wait(self) -> None:
        """Until all are here."""
        self.sum(torch.zeros(1))

    def least(self, number: int) -> int:
        """The smallest that any rank says."""
        found = torch.tensor(number)
        self._do(distributed.all_reduce, found, distributed.ReduceOp.MIN)
        return int(found)

    def swap(self, own: torch.Tensor, cut: int, join: int) -> torch.Tensor:
        """Cut along one dimension, a piece for each rank; join what all have for us along another.

        Apart, what would be sent stands for what would come, which is as large.
        """
        sent = torch.stack(own.chunk(self.count, dim=cut))
        came = sent if self._apart else torch.empty_like(sent)
        self._do(distributed.all_to_all_single, came, sent)
        return torch.cat(came.unbind(), dim=join)

    def reduce(self, vector_P: torch.Tensor, spans: Sequence[slice]) -> None:
        """Sum each span, for its rank; what others have there is then of no use."""
        self._each(distributed.reduce, vector_P, spans)

    def share(self, vector_P: torch.Tensor, spans: Sequence[slice]) -> None:
        """Give all each span, from its rank."""
        self._each(distributed.broadcast, vector_P, spans)

    def _each(self, collective: Any, vector_P: torch.Tensor, spans: Sequence[slice]) -> None:
        if self._apart:
            return
        begun = [
            self._do(collective, vector_P[span], rank, async_op=True)
            for rank, span in enumerate(spans)
            if span.start < span.stop
        ]
        for work in begun:
            self._do(work.wait)

    def gather(self, whole: torch.Tensor, own: torch.Tensor | None, parts: Sequence[slice]) -> None:
        """Fill a vector of rank 0, in main memory, with the parts that the ranks have."""
        for rank, part in self._with_rank_0(parts):
            if rank != self.rank:
                self._do(distributed.recv, whole[part], rank)
            else:
                assert own is not None
                if rank == 0:
                    whole[part] = own
                else:
                    self._do(distributed.send, own.cpu().float(), 0)

    def scatter(
        self, whole: torch.Tensor, own: torch.Tensor | None, parts: Sequence[slice]
    ) -> None:
        """Give each rank its part of a vector that rank 0 has, in main memory."""
        for rank, part in self._with_rank_0(parts):
            if rank != self.rank:
                self._do(distributed.send, whole[part], rank)
            else:
                assert own is not None
                came = whole[part] if rank == 0 else torch.empty(part.stop - part.start)
                if rank != 0:
                    self._do(distributed.recv, came, 0)
                own.copy_(came)

    def _with_rank_0(self, parts: Sequence[slice]) -> list[tuple[int, slice]]:
        """The parts that pass between us and rank 0, with their ranks; those of all at rank 0."""
        return [
            (rank, part)
            for rank, part in enumerate(parts)
            if part.start < part.stop and self.rank in (0, rank)
        ]


ALONE: Final = Ranks()


def parts_of(leaf: slice, spans: Sequence[slice]) -> list[slice]:
    """Each rank's share of a part of the flat vector, as places in that part."""
    both = (shared_part(leaf, span) for span in spans)
    return [slice(part.start - leaf.start, part.stop - leaf.start) for part in both]
