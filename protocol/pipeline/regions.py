"""Links between regions, for pairs of machines of which only the locations are known.

The rows are one-way latency in milliseconds and bandwidth in GiB/s, measured between regions of one
cloud; both ways of a pair are taken to be equal. Machines at the same place have the link of
`SAME_PLACE`.

Source: the table in schedulers/communication_costs.py of SkipPipe (MIT), with NL to London as in
the copy that CheckFree has of it: the original has a hundredth of that, a slip of the pen.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from .problem import THOUSAND

GIB: Final = 1 << 30


class RegionLink(NamedTuple):
    """A link, one way."""

    latency_us: int
    bytes_per_s: int


SAME_PLACE: Final = RegionLink(1_000, 2 * GIB)

_ROWS: Final = """
Australia Belgium     129 0.009827
Australia Canada       98 0.013184
Australia Germany   125.5 0.010461
Australia Iowa         84 0.01123
Australia Japan        58 0.013794
Australia LA           69 0.014648
Australia NL          128 0.009521
Australia Oregon       68 0.014648
Australia Singapore    48 0.029785
Australia Taiwan       67 0.020996
Australia London      132 0.009399
Belgium   Canada       41 0.019897
Belgium   Germany       4 0.2425
Belgium   Iowa         49 0.02832
Belgium   Japan       112 0.011719
Belgium   LA           70 0.019409
Belgium   NL            3 0.2425
Belgium   Oregon       66 0.020874
Belgium   Singapore    83 0.016113
Belgium   Taiwan      105 0.012451
Belgium   London      3.5 0.2425
Canada    Germany      44 0.03186
Canada    Iowa         14 0.075684
Canada    Japan        74 0.018066
Canada    LA           35 0.030518
Canada    NL           42 0.025024
Canada    Oregon     30.5 0.047119
Canada    Singapore   107 0.011938
Canada    Taiwan       89 0.014709
Canada    London     38.5 0.036377
Germany   Iowa       53.5 0.026611
Germany   Japan       112 0.011084
Germany   LA           73 0.01825
Germany   NL          3.5 0.2425
Germany   Oregon       68 0.014917
Germany   Singapore    80 0.0125
Germany   Taiwan      102 0.012573
Germany   London      6.6 0.18875
Iowa      Japan      72.5 0.013977
Iowa      LA         23.4 0.061462
Iowa      NL           51 0.027405
Iowa      Oregon     19.3 0.090332
Iowa      Taiwan       88 0.0128
Iowa      Singapore 101.5 0.012634
Iowa      London     48.1 0.021851
Japan     LA           50 0.027771
Japan     NL        108.5 0.011377
Japan     Oregon     46.2 0.030457
Japan     Singapore  35.6 0.039001
Japan     Taiwan     19.2 0.076721
Japan     London      107 0.008887
LA        NL         71.5 0.014252
LA        Oregon     12.4 0.11853
LA        Singapore  79.5 0.016846
LA        Taiwan       64 0.016193
LA        London       68 0.014917
NL        Oregon       67 0.020386
NL        Singapore  81.5 0.016357
NL        Taiwan    105.5 0.011963
NL        London      4.8 0.023682
Oregon    Singapore  78.5 0.016785
Oregon    Taiwan     59.5 0.023315
Oregon    London       64 0.02124
Singapore Taiwan     23.2 0.06189
Singapore London       85 0.015686
Taiwan    London    109.5 0.00896
"""


def _table(rows: str) -> dict[frozenset[str], RegionLink]:
    table = {}
    for row in rows.split("\n"):
        if row:
            one, other, latency_ms, gib_per_s = row.split()
            latency_us = round(float(latency_ms) * THOUSAND)
            table[frozenset((one, other))] = RegionLink(latency_us, round(float(gib_per_s) * GIB))
    return table


REGION_LINES: Final[Mapping[frozenset[str], RegionLink]] = _table(_ROWS)
REGIONS: Final = tuple(sorted({name for pair in REGION_LINES for name in pair}))


def line_between(one: str, other: str) -> RegionLink | None:
    """The link between two places; None if the table does not know them both."""
    if one == other:
        return SAME_PLACE
    return REGION_LINES.get(frozenset((one, other)))
