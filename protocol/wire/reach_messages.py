"""What peers say of where they can be reached: /loco/reach/1.

    > Whereabouts    < Seen or Refusal

The opener tells where it can be dialled now, and names addresses at which it would like to be
tried. The other takes note, tries them over connections of its own, and says what came of it
(protocol/membership/dial_back.py).
"""

from dataclasses import dataclass
from typing import Annotated

from protocol.limits import MAX_DIAL_BACK_ADDRESSES

from .fields import MAX_ADDRESS_CHARS, Addresses, Count, Many, Text

_TRIED = Many(Text(MAX_ADDRESS_CHARS, r"/[!-~]+"), MAX_DIAL_BACK_ADDRESSES)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the sender can be reached.

    Attributes:
        addresses: as in its hello.
        tried: those that it asks to be dialled at, without its peer id.
    """

    incarnation: Count
    addresses: Addresses
    tried: Annotated[tuple[str, ...], _TRIED] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """How the sender of `Whereabouts` looks from here.

    Attributes:
        observed: the address that its connection comes from, or goes to.
        tried: those that were dialled; the others were passed over.
        reached: those of them where it answered.
    """

    observed: Annotated[str, Text(MAX_ADDRESS_CHARS)]
    tried: Annotated[tuple[str, ...], _TRIED] = ()
    reached: Annotated[tuple[str, ...], _TRIED] = ()
