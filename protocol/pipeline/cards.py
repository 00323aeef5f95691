"""Graphics cards by name: what their makers say, and what of it a trainer is taken to reach.

    peak      TFLOP/s of dense bf16 products that are summed in fp32, from the makers' data sheets;
              the sheets' larger figures are of sparse matrices, which nobody trains with. Cards
              without bf16 (V100, T4) train in fp32 here, so theirs are fp32's
    memory    GB of the card

Nothing here was measured. A forward pass is taken to reach MFU of the peak, which large models on
one card do; small models on large cards reach a fifth of that and less. `loco-peer measure` says
what a card really does.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MFU: Final = 0.35
TERA: Final = 1e12
HOW: Final = f"estimated from peak FLOP/s at {MFU:.0%} MFU; not measured"
_ROWS: Final = """
B200           2250   180
H200            989   141
H100            989    80
H100-PCIe       756    80
H100-NVL        835    94
GH200           989    96
A100            312    40
A100-80GB       312    80
A40             150    48
A10             125    24
A10G             70    24
L40S            362    48
L40             181    48
L4              121    24
RTX-6000-Ada    364    48
RTX-A6000       155    48
RTX-A5000       111    24
RTX-5090        210    32
RTX-4090        165    24
RTX-4080         97    16
RTX-3090         71    24
RTX-3080         60    10
V100             15.7  16
V100-32GB        15.7  32
T4                8.1  16
"""


@dataclass(frozen=True, slots=True)
class Card:
    """One model of card; see the top of the file."""

    name: str
    peak_flops: float
    memory_bytes: int

    def forward_s(self, flops: float) -> float:
        """Seconds of a forward pass of so many operations."""
        return flops / (self.peak_flops * MFU)


def _cards() -> dict[str, Card]:
    rows = (line.split() for line in _ROWS.strip().splitlines())
    return {
        name: Card(name, float(peak) * TERA, int(memory) * 10**9) for name, peak, memory in rows
    }


CARDS: Final[Mapping[str, Card]] = _cards()


def card_named(name: str) -> Card | None:
    """The card that is meant: case, spaces, the maker and `RTX` do not matter."""
    return _BY_KEY.get(_key(name))


def nearest_names(name: str) -> list[str]:
    """Names of cards that are like this one."""
    near = difflib.get_close_matches(_key(name), _BY_KEY, n=3, cutoff=0.4)
    return [_BY_KEY[key].name for key in near]


def _key(name: str) -> str:
    plain = name.lower()
    for word in ("nvidia", "geforce", "tesla", "rtx", "sxm5", "sxm4", "sxm"):
        plain = plain.replace(word, "")
    return "".join(letter for letter in plain if letter.isalnum())


_BY_KEY: Final = {_key(name): card for name, card in CARDS.items()}
