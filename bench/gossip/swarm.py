"""Abstract peers that train in rounds and exchange over shared lines: rules are tried on them.

Time counts in rounds of a peer, all of which are equally fast on the average; each single round is
scattered. Matching takes no time and no message. An exchange of a middle pair takes `ratio` rounds;
those of other pairs lie within a factor of SPREAD of that. A peer sends over its own line and
receives over it, each at once and each shared by what runs at the same time. Peers 0 and 1 are
behind one uplink that carries one exchange at the middle rate.

What a rule decides (same_round.py, ask_anybody.py, free_with_free.py): when rounds close, who
exchanges with whom, and who merges what.
"""

import itertools
import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Any, Final

from .agenda import Action, Agenda
from .lines import SharedLines, Transfer
from .measures import Pair, pair_figures, quantile

SPREAD: Final = 1.5
UPLINK: Final = (0, 1)
"""Peers behind one uplink."""
LEAST_PACE: Final = 0.4


@dataclass(frozen=True, slots=True)
class Setting:
    """One world.

    Attributes:
        ratio: exchange over round.
        scatter: standard deviation of a round's time, as a share.
        rounds: how long it is watched.
    """

    num_peers: int
    ratio: float
    seed: int = 0
    scatter: float = 0.25
    rounds: float = 300.0


@dataclass(slots=True, eq=False)
class Trainee:
    """One peer.

    Attributes:
        place: its number.
        step: nominal rounds where its present round began.
        pace: time of one nominal round, in this round.
        under_way: transfers that it takes part in.
        busy: time in which there was one.
        ages: of its averages when it merged them, in nominal rounds.
    """

    place: int
    step: float = 0.0
    began: float = 0.0
    pace: float = 1.0
    opened: int = 0
    under_way: int = 0
    busy_since: float = 0.0
    busy: float = 0.0
    vectors_sent: int = 0
    ages: list[float] = field(default_factory=list)


class Swarm:
    """Trains peers and carries what they exchange.

    Attributes:
        peers: by place.
        meetings: pairs of which at least one side merges, in the order in which they began.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rng = random.Random(f"{setting.num_peers}/{setting.seed}")
        self.agenda = Agenda()
        self.peers = [Trainee(place) for place in range(setting.num_peers)]
        self.meetings: list[Pair] = []
        self._lines = SharedLines(self.agenda)
        log_spread = math.log(SPREAD)
        self._factor = {
            pair: math.exp(self.rng.uniform(-log_spread, log_spread))
            for pair in itertools.combinations(range(setting.num_peers), 2)
        }

    def __repr__(self) -> str:
        return f"<Swarm of {self.setting}>"

    @property
    def now(self) -> float:
        return self.agenda.now_s

    # --- training ---------------------------------------------------------------------------------
    def open_round(self, peer: Trainee, quota: float, then: Action) -> None:
        """Begin a round where the peer stands; `then` is called when it has trained its quota."""
        peer.step = self.nominal(peer)
        peer.began = self.now
        peer.pace = max(LEAST_PACE, self.rng.gauss(1.0, self.setting.scatter))
        peer.opened += 1
        opened = peer.opened
        self.agenda.after(quota * peer.pace, lambda: then() if opened == peer.opened else None)

    def trained(self, peer: Trainee) -> float:
        """Nominal rounds trained since the present round began."""
        return (self.now - peer.began) / peer.pace if peer.opened else 0.0

    def nominal(self, peer: Trainee) -> float:
        """Where it stands, in nominal rounds."""
        return peer.step + self.trained(peer)

    # --- exchanges --------------------------------------------------------------------------------
    def swap(self, one: Trainee, other: Trainee, done: Action) -> Transfer:
        """Carry a vector each way."""
        alone = self._one_way(one, other) | self._one_way(other, one)
        return self._carry((one, other), (one, other), alone, done)

    def pull(self, asker: Trainee, asked: Trainee, done: Action) -> Transfer:
        """Carry a vector to the asker."""
        return self._carry((asker, asked), (asked,), self._one_way(asked, asker), done)

    def give_up(self, transfer: Transfer, *peers: Trainee) -> None:
        """Break an exchange off."""
        self._lines.give_up(transfer)
        self._ended(peers)

    def _carry(
        self,
        peers: tuple[Trainee, ...],
        senders: tuple[Trainee, ...],
        alone: dict[str, float],
        done: Action,
    ) -> Transfer:
        for peer in peers:
            if not peer.under_way:
                peer.busy_since = self.now
            peer.under_way += 1
        for peer in senders:
            peer.vectors_sent += 1

        def arrived() -> None:
            self._ended(peers)
            done()

        return self._lines.begin(alone, arrived)

    def _ended(self, peers: tuple[Trainee, ...]) -> None:
        for peer in peers:
            peer.under_way -= 1
            if not peer.under_way:
                peer.busy += self.now - peer.busy_since

    def _one_way(self, sender: Trainee, receiver: Trainee) -> dict[str, float]:
        middle = self.setting.ratio
        pair = min(sender.place, receiver.place), max(sender.place, receiver.place)
        seconds = middle * self._factor[pair]
        alone = {f"{sender.place} up": seconds, f"{receiver.place} down": seconds}
        if sender.place in UPLINK:
            alone["home up"] = middle
        if receiver.place in UPLINK:
            alone["home down"] = middle
        return alone

    # --- figures ----------------------------------------------------------------------------------
    def meet(self, one: Trainee, other: Trainee) -> None:
        """Note that these two average."""
        self.meetings.append((one.place, other.place))

    def figures(self) -> dict[str, Any]:
        """What came of it, when it is over; ages and shares in rounds."""
        shares = [len(peer.ages) / max(1e-9, self.nominal(peer)) for peer in self.peers]
        usual = [share for place, share in enumerate(shares) if place not in UPLINK]
        pairs = pair_figures(self.meetings, self.setting.num_peers)
        ages = [age for peer in self.peers for age in peer.ages]
        for peer in self.peers:  # what is still under way
            peer.busy += self.now - peer.busy_since if peer.under_way else 0.0
        return {
            "exchanged": statistics.fmean(usual),
            "least": min(usual),
            "uplink": statistics.fmean(shares[place] for place in UPLINK),
            "busy": statistics.fmean(peer.busy for peer in self.peers) / self.now,
            "sent": self._sent(len(ages)),
            "repeats": pairs.repeats,
            "cv": pairs.cv,
            "chi2": pairs.chi_squared,
            "age": statistics.fmean(ages) if ages else math.nan,
            "age 99%": quantile(ages, 0.99),
        }

    def _sent(self, averages: int) -> float:
        """Vectors for each average."""
        sent = sum(peer.vectors_sent for peer in self.peers)
        return sent / averages if averages else math.nan
