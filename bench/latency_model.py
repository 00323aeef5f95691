"""The paper's accounting of time: how long an average takes, and how long peers wait for others.

Messages. A message takes a log-normal time T with mean 1 and dispersion cv = std / mean; the number
of bytes is left out. A tree all-reduce of n peers goes up log2(n) levels, where a parent waits for
two children, and down again. A pair exchanges two messages at once, and is done with the later one:

    E[pair] = 2 E[max(T1, T2)] = 2 (1 + erf(sigma / 2)) E[T],    sigma^2 = ln(1 + cv^2)

(twice, because the paper sees a pair as the lowest level of the tree). Figure 5A is E[tree] over
that.

Waiting. An inner step takes a log-normal time with mu = 1, sigma^2 = 0.5. With an all-reduce every
outer step waits for the slowest of n peers; with pairs, for the slower of two. Figure 5B is the
time of 250 outer steps of the first over that of the second.

Bytes. S bytes of codes, latency L of one message, bandwidth B of a peer in each direction:

    pair                 L + S / B                                    S bytes sent by each peer
    ring                 2 (n - 1) (L + S / (n B))                    2 S (n - 1) / n
    tree                 2 log2(n) (L + S / B)                        2 S, about
    halving-doubling     2 log2(n) L + 2 S (n - 1) / (n B)            2 S (n - 1) / n

Source: NoLoCo, arXiv 2506.10911, section 5.3 and figure 5; the last block by plain counting.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

INNER_MU: Final = 1.0
INNER_SIGMA: Final = math.sqrt(0.5)
OUTER_STEPS: Final = 250
Times = npt.NDArray[np.float64]


def log_normal_sigma(cv: float) -> float:
    """Sigma of a log-normal with dispersion `cv`."""
    return math.sqrt(math.log(1 + cv * cv))


def pair_time(cv: float) -> float:
    """E[pair], in mean message times."""
    return 2 * (1 + math.erf(log_normal_sigma(cv) / 2))


def tree_time(rng: np.random.Generator, peers: int, cv: float, draws: int) -> float:
    """E[tree all-reduce] over `peers`, a power of two, in mean message times."""
    ready = np.zeros((draws, peers))
    while ready.shape[1] > 1:
        ready = (ready + _messages(rng, cv, ready.shape)).reshape(draws, -1, 2).max(axis=2)
    arrived = ready
    while arrived.shape[1] < peers:
        arrived = np.repeat(arrived, 2, axis=1)
        arrived = arrived + _messages(rng, cv, arrived.shape)
    return float(arrived.max(axis=1).mean())


def blocking_overhead(rng: np.random.Generator, peers: int, inner_steps: int) -> float:
    """Time of OUTER_STEPS rounds that wait for everybody, over rounds that wait in pairs."""
    together_s, own_s = 0.0, np.zeros(peers)
    for _ in range(OUTER_STEPS):
        work_s = rng.lognormal(INNER_MU, INNER_SIGMA, (peers, inner_steps)).sum(axis=1)
        together_s += work_s.max()
        own_s += work_s
        one, other = rng.permutation(peers).reshape(2, -1)
        own_s[one] = own_s[other] = np.maximum(own_s[one], own_s[other])
    return float(together_s / own_s.max())


def _messages(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> Times:
    sigma = log_normal_sigma(cv)
    return rng.lognormal(-sigma * sigma / 2, sigma, shape)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One average of n peers.

    Attributes:
        peers: n.
        code_bytes: S.
        latency_s: L.
        bytes_per_s: B.
    """

    peers: int
    code_bytes: float
    latency_s: float
    bytes_per_s: float

    @property
    def _levels(self) -> float:
        return math.log2(self.peers)

    @property
    def _share_s(self) -> float:
        """Seconds for the bytes of the ring, 2 S (n - 1) / n."""
        sent_bytes = 2 * self.code_bytes * (self.peers - 1) / self.peers
        return sent_bytes / self.bytes_per_s

    def pair_s(self) -> float:
        """Seconds of two peers, both ways at once."""
        return self.latency_s + self.code_bytes / self.bytes_per_s

    def ring_s(self) -> float:
        """Seconds of all peers, in a ring."""
        return 2 * (self.peers - 1) * self.latency_s + self._share_s

    def tree_s(self) -> float:
        """Seconds of all peers, up and down a binary tree: the paper's comparison."""
        return 2 * self._levels * self.pair_s()

    def halving_doubling_s(self) -> float:
        """Seconds of all peers, by recursive halving and doubling: the strongest rival."""
        return 2 * self._levels * self.latency_s + self._share_s
