"""The arms of the study: a way of averaging, what liars send, and whether the rest defend.

Peers of the arms `none-14` and `none-11` are the honest ones of 2 and 5 liars of 16, with the same
data; the liars stay away. What an attack costs is the distance to those. In `unequal` nobody lies,
and half of the peers are four times slower, so what they send has other lengths. Names end with the
number of liars, or of the peers where there are none, and with `-off` where nothing is clipped and
nothing but broken codes is refused. With `-audited` the results of owners are audited, and owners
that are caught are banned. With `-trim` owners take the trimmed mean (`sync.diloco.robust`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

Way = Literal["pairs", "fragments"]
Defence = Literal["on", "off"]
PEERS: Final = 16
SHARES: Final = (2, 5)
"""Liars among PEERS: of a tenth and of three tenths the nearest whole numbers."""
CONTRIBUTED: Final = (
    "flip",
    "scale-10",
    "scale-100",
    "noise",
    "replay",
    "nan",
    "huge",
    "inner",
    "collude",
)
"""Lies of peers that send weights or contributions (liars.py says what they are)."""
OWNED: Final = ("owner-near", "owner-far")
"""Lies of owners of chunks: of averages as long as is let through, and of much longer ones."""
MAIN: Final = ("flip", "scale-10", "huge", "inner", "collude", "owner-near")
"""The attacks of the quick setting: the others are near to one of these."""
NONE: Final = "none"
TRIMMED: Final = ("flip", "scale-10", "inner", "collude")
"""Lies that are tried on trimmed means, too."""
SLOWER: Final = 4


@dataclass(frozen=True, slots=True)
class HostileArm:
    """One company, and what is done to it.

    Attributes:
        attack: what the liars send; `none` without.
        liars: the last of the peers.
        absent: peers that stay away: the last ones.
        audited: whether results of owners are worked out again (fragments alone).
        trims: whether owners take the trimmed mean (fragments alone).
        slow: every second peer takes one step where the others take SLOWER.
    """

    name: str
    way: Way
    attack: str = NONE
    liars: int = 0
    absent: int = 0
    defence: Defence = "on"
    slow: bool = False
    audited: bool = False
    trims: bool = False

    @property
    def honest(self) -> int:
        """Number of honest peers; they come first."""
        return PEERS - self.liars - self.absent

    @property
    def reference(self) -> str:
        """The arm of the same honest peers without liars."""
        return f"{self.way}-{'unequal' if self.slow else NONE}-{self.honest}"

    @property
    def is_of_owners(self) -> bool:
        """Whether the liars lie as owners, not as contributors."""
        return self.attack in OWNED

    @property
    def is_main(self) -> bool:
        """Whether the quick setting has it."""
        return self.attack in (NONE, *MAIN) and (self.defence == "on" or self.attack == NONE)


def _of_way(way: Way) -> Iterator[HostileArm]:
    for honest in (PEERS, *(PEERS - liars for liars in SHARES)):
        yield HostileArm(f"{way}-{NONE}-{honest}", way, absent=PEERS - honest)
    yield HostileArm(f"{way}-{NONE}-{PEERS}-off", way, defence="off")
    yield HostileArm(f"{way}-unequal-{PEERS}", way, slow=True)
    yield HostileArm(f"{way}-unequal-{PEERS}-off", way, slow=True, defence="off")
    attacks = CONTRIBUTED if way == "pairs" else (*CONTRIBUTED, *OWNED)
    for liars in SHARES:
        for attack in attacks:
            name = f"{way}-{attack}-{liars}"
            yield HostileArm(name, way, attack, liars)
            yield HostileArm(f"{name}-off", way, attack, liars, defence="off")
            if attack in OWNED:
                yield HostileArm(f"{name}-audited", way, attack, liars, audited=True)


def _trimmed() -> Iterator[HostileArm]:
    yield HostileArm(f"fragments-{NONE}-{PEERS}-trim", "fragments", trims=True)
    for liars in SHARES:
        for attack in TRIMMED:
            name = f"fragments-{attack}-{liars}-trim"
            yield HostileArm(name, "fragments", attack, liars, trims=True)


ARMS: Final = {arm.name: arm for arm in (*_of_way("pairs"), *_of_way("fragments"), *_trimmed())}
