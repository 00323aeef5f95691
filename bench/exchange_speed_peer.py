"""One of the peers of bench/exchange_speed.py that average fragments: real p2pd, real exchange.

All parts are the daemon's own but for the trainer, which here never reads the outer copy, so that
every result may be written as soon as it is there. All fragments of the model are sent at once.

The pseudo-gradient of a peer is noise of its seed, repeated; the same in each exchange. With phi
and v from before the last step, the step itself says what D was,

    D = ((phi - phi') / lr - mu^2 v) / (1 + mu)

and so how far it is from the true mean. An owner that was told of a fast link gives up too early on
the first exchange over a slow one: `whole` says whether all peers are in all chunks.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import blake3
import numpy as np
import torch
import trio

from peer.averaging.diloco.fragment_exchange import FragmentExchange, FragmentParts
from peer.averaging.diloco.nesterov import NesterovFactors
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import get_codec
from peer.facts import Facts
from peer.network.identity import Identity, load_or_create
from peer.network.libp2p import Libp2pNetwork, open_libp2p_network
from peer.observe.events import EventLog
from peer.rounds.services import Services
from peer.runtime.work import RealWork
from protocol.diloco.commands import GroupSeen, HoldOutcome, SendEnded, Sent
from protocol.diloco.peers import FragmentCounts
from protocol.fragment.fragments import Fragment, cut_fragments
from protocol.membership.view import Roster
from protocol.run.layout import Layout
from protocol.trainer_messages import Merge, Yield

from .children import Answer, answer_parent
from .exchange_speed_data import mean_of_all, model_layout, noise, relative_error

GROUP: Final = "0" * 32
BLOCKS_PER_FRAGMENT: Final = 3
FACTORS: Final = NesterovFactors(learning_rate=0.4, momentum=0.9)


class IdleTrainer:
    """A trainer that reads nothing."""

    can_write = True

    async def may_write(self) -> None:
        await trio.lowlevel.checkpoint()

    async def merge(self, message: Merge) -> None:
        await trio.lowlevel.checkpoint()

    async def hold(self, message: Yield) -> HoldOutcome:
        await trio.lowlevel.checkpoint()
        return HoldOutcome.FREE


class MembersOfGroup:
    """Peers that all are in the same cycle."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self.members = frozenset([own_id])
        self.cycle = 0

    def seen(self) -> GroupSeen:
        others = self.members - {self._own_id}
        return GroupSeen(self.cycle, self.members, dict.fromkeys(others, self.cycle))

    def is_linked(self, peer_id: str) -> bool:
        return True


class NoProofs:
    """A home that keeps no proofs."""

    def read(self) -> Sequence[tuple[str, bytes]]:
        """Nothing."""
        return ()

    def keep(self, owner: str, proof: bytes) -> None:
        """Nothing is kept."""


class ReturnedSends:
    """The ends of the sends of one exchange."""

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self.sends: list[SendEnded] = []
        self.all_returned = trio.Event()

    def forget(self) -> None:
        """Another exchange begins."""
        self.sends, self.all_returned = [], trio.Event()

    def returned(self, returned: SendEnded) -> None:
        self.sends.append(returned)
        if len(self.sends) == self._num_fragments:
            self.all_returned.set()

    def convicted(self, owner: str) -> None:
        raise AssertionError(f"{owner} was convicted")


class SpeedPeer:
    """Answers the measurement's questions."""

    def __init__(
        self, network: Libp2pNetwork, identity: Identity, layout: Layout, index: int
    ) -> None:
        self._network = network
        self._company = MembersOfGroup(network.peer_id)
        codec = get_codec("int8", part_of=layout.padded_parameters)
        fragments = cut_fragments(layout, "strided", BLOCKS_PER_FRAGMENT)
        self._phi_P = np.zeros(layout.padded_parameters, np.float32)
        self._v_P = np.zeros_like(self._phi_P)
        self._before = self._phi_P.copy(), self._v_P.copy()
        outer = OuterFragments(fragments, self._phi_P, self._v_P, codec, FACTORS, lambda _: False)
        self._codes = _encoded(outer, noise(layout.padded_parameters, index))
        self._record = ReturnedSends(len(fragments))
        services = Services(
            network=network,
            work=RealWork(),
            roster=Roster(silence_s=10.0),
            events=EventLog(lambda _: None, peer="", wall_time_s=lambda: 0.0, stream=None),
            facts=Facts(network.peer_id, incarnation=1),
            sign=identity.sign,
        )
        parts = FragmentParts(
            services=services,
            group=GROUP,
            members=self._company,
            trainer=IdleTrainer(),
            ended=self._record.returned,
            convict=self._record.convicted,
            proofs=NoProofs(),
            lock=trio.Lock(),
            counts=FragmentCounts(),
            inner_steps=1,
            trims=False,
            last_sent=[-1] * len(fragments),
        )
        self._exchange = FragmentExchange(parts, outer)

    async def run(self) -> None:
        """Serve until the parent asks no more."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._exchange.run)
            await answer_parent(
                {
                    "hello": self.hello,
                    "join": self.join,
                    "prepare": self.prepare,
                    "exchange": self.exchange,
                    "check": self.check,
                }
            )
            nursery.cancel_scope.cancel()

    async def hello(self, _: Answer) -> Answer:
        return {
            "peer_id": self._network.peer_id,
            "addresses": list(self._network.addresses),
            "p2pd_pid": self._network.statistics().p2pd_pid,
        }

    async def join(self, question: Answer) -> Answer:
        """Take part in a group of these peers."""
        for hello in question["hellos"]:
            if hello["peer_id"] != self._network.peer_id:
                await self._network.connect(hello["peer_id"], hello["addresses"])
        self._company.members = frozenset(hello["peer_id"] for hello in question["hellos"])
        return {}

    async def prepare(self, _: Answer) -> Answer:
        self._record.forget()
        for before, now in zip(self._before, (self._phi_P, self._v_P), strict=True):
            before[:] = now
        return {}

    async def exchange(self, _: Answer) -> Answer:
        """Send the whole model, and wait until all of it is stepped."""
        began_s = time.perf_counter()
        for fragment, codes in enumerate(self._codes):
            sent = Sent(fragment, self._company.cycle, codes, steps=1, tokens=1)
            self._exchange.sent(sent)
        await self._record.all_returned.wait()
        ended_s = time.perf_counter()
        self._company.cycle += 1
        return {"began_s": began_s, "ended_s": ended_s, "whole": self._is_whole()}

    def _is_whole(self) -> bool:
        """Whether the last exchange has averaged all of all peers."""
        in_results = [
            len(result.of_chunk.places)
            for machine in self._exchange._core._machines
            for result in machine.writes._results.values()
        ]
        missing = sum(returned.missing for returned in self._record.sends)
        return not missing and min(in_results) == len(self._company.members)

    async def check(self, question: Answer) -> Answer:
        """The distance to the true mean, and a digest that all peers should have in common."""
        phi_P, v_P = (torch.from_numpy(before) for before in self._before)
        lr, mu = FACTORS.learning_rate, FACTORS.momentum
        D_P = ((phi_P - torch.from_numpy(self._phi_P)) / lr - mu**2 * v_P) / (1 + mu)
        digest = blake3.blake3(self._phi_P.view(np.uint8).data).hexdigest(length=16)
        error = relative_error(D_P, mean_of_all(len(D_P), question["num_peers"]))
        return {"error": error, "digest": digest}


def _encoded(outer: OuterFragments, u_P: torch.Tensor) -> list[memoryview]:
    """The codes of each fragment, chunk after chunk, as a trainer sends them."""
    return [_encoded_fragment(outer, fragment, u_P) for fragment in outer.fragments]


def _encoded_fragment(outer: OuterFragments, fragment: Fragment, u_P: torch.Tensor) -> memoryview:
    codes = bytearray()
    for chunk in range(len(fragment.chunks)):
        part = torch.empty(outer.chunk_code_bytes(fragment.index, chunk), dtype=torch.uint8)
        u_C = torch.cat([u_P[start:stop] for start, stop in fragment.chunk_spans(chunk)])
        outer.codec.encode(u_C, part)
        codes += part.numpy().data
    return memoryview(codes)


async def main(folder: Path, address: str, index: int, num_values: int) -> None:
    """Run one peer, with its key and sockets in `folder`."""
    torch.set_num_threads(1)
    key = folder / f"{index}.key"
    identity = load_or_create(key)
    listen = [f"/ip4/{address}/tcp/0"]
    async with open_libp2p_network(key, listen=listen, runtime_dir=folder) as network:
        await SpeedPeer(network, identity, model_layout(num_values), index).run()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
