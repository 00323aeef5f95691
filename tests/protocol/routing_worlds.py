"""Peers of a pipeline that have measured their links, without any network."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.address.peer_id import peer_id_from_public_key
from protocol.pipeline.problem import PathRules
from protocol.routing.measures import LinkTimes, LinkVector, WorkTimes, encode_vector
from protocol.routing.snapshots import LinkSnapshot, Terms

RUN_ID = "ab" * 16
WORK = WorkTimes(50_000, 100_000, 10_000)


class Signer:
    """A peer with its key."""

    def __init__(self, number):
        self._key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
        self.peer_id = peer_id_from_public_key(self._key.public_key().public_bytes_raw())

    def sign(self, data):
        return self._key.sign(data)


SIGNERS = [Signer(number) for number in range(1, 21)]


class MeasuredWorld:
    """Peers of some stages; `rtt_us` says what lies between two of them, by number."""

    def __init__(self, stages, rtt_us, line_us=lambda a, b: 5_000):
        self.stages = stages
        self.peers = sorted(SIGNERS[: len(stages)], key=lambda signer: signer.peer_id)
        self.rtt_us = rtt_us
        self.line_us = line_us
        self.numbers = [1] * len(stages)
        self.work = [WORK] * len(stages)

    def vector(self, one):
        links = tuple(
            LinkTimes(
                peer.peer_id, self.rtt_us(one, other), self.line_us(one, other),
                self.line_us(other, one),
            )
            for other, peer in enumerate(self.peers)
            if other != one
        )  # fmt: skip
        me = self.peers[one].peer_id
        return LinkVector(me, 1, self.numbers[one], self.stages[one], 4, self.work[one], links)

    def signed(self, one):
        return encode_vector(self.vector(one), RUN_ID, self.peers[one].sign)

    def snapshot(self):
        numbers = range(len(self.stages))
        return LinkSnapshot.of(RUN_ID, [(self.vector(one), self.signed(one)) for one in numbers])

    def relays(self):
        held = list(zip(self.stages, self.peers, strict=True))
        return tuple(
            tuple(peer.peer_id for stage, peer in held if stage == wanted)
            for wanted in range(1, max(self.stages) + 1)
        )

    def origins(self):
        return [p.peer_id for s, p in zip(self.stages, self.peers, strict=True) if s == 0]

    def terms(self, visited=3, microbatches=8):
        return Terms(max(self.stages) + 1, visited, microbatches, 1_000_000, PathRules())
