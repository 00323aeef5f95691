"""The two tables of `loco-peer plan`: machines on offer, and links between them.

    peers    peer,location,price_per_hour, then compute_s or card; if you like, slots, memory_gb,
             gpus, gpu_link
    links    a,b,latency_ms,bandwidth_mbps; one way, from a to b

`compute_s` is the forward pass of one microbatch through the whole model; without it, it is
estimated for the `card`. `slots` are microbatches of one stage that the machine can hold. `gpus`
are cards of one machine, each as `compute_s`, `card` and `memory_gb` say, which train as one peer
over `gpu_link`; the price is the machine's. Its stage of a pipeline is held by one. The first line
names the columns, in any order; empty lines and lines that begin with # are passed over. A
pair without a link is looked up by its locations in the table of regions; where that does not know
them, the link of the other way counts. Every error names its line.

Regions: one-way latency in milliseconds and bandwidth in GiB/s, measured between regions of one
cloud; both ways of a pair are taken to be equal. Machines at the same place have SAME_PLACE.
Source: schedulers/communication_costs.py of SkipPipe (MIT), with NL to London as in the copy that
CheckFree has of it: the original has a hundredth of that, a slip of the pen.

Cards, by their makers' data sheets:

    peak      TFLOP/s of dense bf16 products that are summed in fp32; the sheets' larger figures are
              of sparse matrices, which nobody trains with. Cards without bf16 (V100, T4) train in
              fp32 here, so theirs are fp32's
    memory    GB of the card

    link      bytes a second each way between the cards of a machine, half of what sheets promise:
              of PCIe 4.0 with 16 lanes, and of an A100's NVLink

Nothing here was measured. A forward pass is taken to reach MFU of the peak, which large models on
one card do; small models on large cards reach a fifth of that and less. `loco-peer measure` says
what a card really does.
"""

import csv
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final, NamedTuple

from protocol.errors import Unusable

from .problem import MAX_PEERS, THOUSAND, US_PER_S, Matrix

# --- regions --------------------------------------------------------------------------------------


class RegionLink(NamedTuple):
    """A link, one way."""

    latency_us: int
    bytes_per_s: int


SAME_PLACE: Final = RegionLink(1_000, 2 << 30)

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


REGION_LINES: Final[Mapping[frozenset[str], RegionLink]] = {
    frozenset((one, other)): RegionLink(
        round(float(latency_ms) * THOUSAND), round(float(gib_per_s) * (1 << 30))
    )
    for one, other, latency_ms, gib_per_s in map(str.split, _ROWS.strip().splitlines())
}
REGIONS: Final = tuple(sorted({name for pair in REGION_LINES for name in pair}))


def line_between(one: str, other: str) -> RegionLink | None:
    """The link between two places; None if the table does not know them both."""
    if one == other:
        return SAME_PLACE
    return REGION_LINES.get(frozenset((one, other)))


# --- cards ----------------------------------------------------------------------------------------
MFU: Final = 0.35
HOW: Final = f"estimated from peak FLOP/s at {MFU:.0%} MFU; not measured"
_CARDS: Final = """
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
    name: str
    peak_flops: float
    memory_bytes: int

    def forward_s(self, flops: float) -> float:
        return flops / (self.peak_flops * MFU)


CARDS: Final[Mapping[str, Card]] = {
    name: Card(name, float(peak) * 1e12, int(memory) * 10**9)
    for name, peak, memory in map(str.split, _CARDS.strip().splitlines())
}


GPU_LINKS: Final[Mapping[str, int]] = {"pcie": 16 * 10**9, "nvlink": 150 * 10**9}


def card_named(name: str) -> Card | None:
    """The card that is meant: case, spaces, the maker and `RTX` do not matter."""
    return _BY_KEY.get(_key(name))


def nearest_names(name: str) -> list[str]:
    near = difflib.get_close_matches(_key(name), _BY_KEY, n=3, cutoff=0.4)
    return [_BY_KEY[key].name for key in near]


def _key(name: str) -> str:
    plain = name.lower()
    for word in ("nvidia", "geforce", "tesla", "rtx", "sxm5", "sxm4", "sxm"):
        plain = plain.replace(word, "")
    return "".join(letter for letter in plain if letter.isalnum())


_BY_KEY: Final = {_key(name): card for name, card in CARDS.items()}


# --- tables ---------------------------------------------------------------------------------------
PEER_COLUMNS: Final = ("peer", "location", "price_per_hour")
OPTIONAL_PEER_COLUMNS: Final = ("compute_s", "card", "slots", "memory_gb", "gpus", "gpu_link")
USUAL_SLOTS: Final = 4
LINK_COLUMNS: Final = ("a", "b", "latency_ms", "bandwidth_mbps")
BYTE_ORDER_MARK: Final = "\ufeff"
"""Some spreadsheets begin a file with it."""
MAX_VALUE: Final = 1e9
Row = tuple[str, Mapping[str, str]]
"""Where a line stands, and its values by column."""


class BadTable(Unusable):
    """A table cannot be used; the message names the line and says what is wrong."""


@dataclass(frozen=True, slots=True)
class MachineOffer:
    """A machine that could take part.

    Attributes:
        compute_us, memory_bytes: of one device; None where the table does not say.
        card: its name, where the time was estimated from that.
        gpus: such devices, with so many bytes a second each way between them.
        where: the line of the table, for messages.
    """

    name: str
    location: str
    compute_us: int
    slots: int
    price_per_hour: float
    memory_bytes: int | None = None
    card: str | None = None
    gpus: int = 1
    gpu_bytes_per_s: int = GPU_LINKS["pcie"]
    where: str = field(default="", compare=False)


def parse_peers(
    text: str, name: str = "peers", forward_flops: float | None = None
) -> tuple[MachineOffer, ...]:
    """Read the table of machines.

    Args:
        forward_flops: of one microbatch through the whole model; without it no card will do.

    Raises:
        BadTable
    """
    offers: dict[str, MachineOffer] = {}
    for where, row in _rows(text, name, PEER_COLUMNS, OPTIONAL_PEER_COLUMNS):
        offer = _offer(where, row, forward_flops)
        if offer.name in offers:
            raise BadTable(f"{where}: a second machine with the name '{offer.name}'")
        offers[offer.name] = offer
    if not offers:
        raise BadTable(f"{name}: no machine in it, only the names of columns")
    if len(offers) > MAX_PEERS:
        raise BadTable(f"{name}: {len(offers)} machines; at most {MAX_PEERS} can be planned for")
    return tuple(offers.values())


def parse_links(
    text: str, offers: Sequence[MachineOffer], name: str = "links"
) -> dict[tuple[str, str], RegionLink]:
    """Read the table of links. Raises BadTable."""
    names = {offer.name for offer in offers}
    links: dict[tuple[str, str], RegionLink] = {}
    for where, row in _rows(text, name, LINK_COLUMNS, ()):
        pair = row["a"], row["b"]
        for end in pair:
            if end not in names:
                raise BadTable(f"{where}: no machine is called '{end}' in the table of peers")
        if pair[0] == pair[1]:
            raise BadTable(f"{where}: a link from '{pair[0]}' to itself")
        if pair in links:
            raise BadTable(f"{where}: a second link from '{pair[0]}' to '{pair[1]}'")
        latency_ms = _number(where, row, "latency_ms", 0)
        mbps = _number(where, row, "bandwidth_mbps", 0.001)
        rate = round(mbps * US_PER_S / 8)
        links[pair] = RegionLink(round(latency_ms * THOUSAND), rate)
    return links


def link_matrices(
    offers: Sequence[MachineOffer], links: Mapping[tuple[str, str], RegionLink]
) -> tuple[Matrix, Matrix]:
    """Latency in microseconds and rate in bytes per second, between any two.

    Raises:
        BadTable: a pair has no link and no known locations.
    """
    lines = [[_line(a, b, links) for b in offers] for a in offers]
    missing = [
        (offers[i], offers[k])
        for i, row in enumerate(lines)
        for k, line in enumerate(row)
        if line is None and i < k
    ]
    if missing:
        raise BadTable(_unknown(missing))
    known = [[line or SAME_PLACE for line in row] for row in lines]
    latencies = tuple(tuple(line.latency_us for line in row) for row in known)
    return latencies, tuple(tuple(line.bytes_per_s for line in row) for row in known)


def _line(
    a: MachineOffer, b: MachineOffer, links: Mapping[tuple[str, str], RegionLink]
) -> RegionLink | None:
    if a is b:
        return SAME_PLACE
    known = links.get((a.name, b.name)) or line_between(a.location, b.location)
    return known or links.get((b.name, a.name))


def _unknown(missing: Sequence[tuple[MachineOffer, MachineOffer]]) -> str:
    a, b = missing[0]
    strange = next(offer for offer in (a, b) if offer.location not in REGIONS)
    more = f" (and one for each of {len(missing)} such pairs)" if len(missing) > 1 else ""
    return (
        f"{strange.where or strange.name}: the table of regions does not know"
        f" '{strange.location}', and there is no link from '{a.name}' to '{b.name}'; add"
        f" '{a.name},{b.name},LATENCY_MS,MBPS'{more} to the links, or use a location of the table:"
        f" {', '.join(REGIONS)}"
    )


def _offer(where: str, row: Mapping[str, str], forward_flops: float | None) -> MachineOffer:
    if not row["peer"]:
        raise BadTable(f"{where}: the machine has no name")
    if not row["price_per_hour"]:
        raise BadTable(f"{where}: no price_per_hour; write 0 for a machine of your own")
    card = _card(where, row)
    memory = None if card is None else card.memory_bytes
    if row.get("memory_gb"):
        memory = round(_number(where, row, "memory_gb", 0) * 10**9)
    if row.get("compute_s") or card is None or forward_flops is None:
        compute_s, estimated = _number(where, row, "compute_s", 1e-5), None
    else:
        compute_s, estimated = card.forward_s(forward_flops), card.name
    return MachineOffer(
        row["peer"],
        row["location"],
        max(1, round(compute_s * US_PER_S)),
        _count(where, row, "slots") if row.get("slots") else USUAL_SLOTS,
        _number(where, row, "price_per_hour", 0),
        memory,
        estimated,
        _count(where, row, "gpus") if row.get("gpus") else 1,
        _gpu_link(where, row),
        where,
    )


def _gpu_link(where: str, row: Mapping[str, str]) -> int:
    name = (row.get("gpu_link") or "pcie").lower()
    if name not in GPU_LINKS:
        raise BadTable(f"{where}: gpu_link is '{name}'; use {' or '.join(GPU_LINKS)}")
    return GPU_LINKS[name]


def _card(where: str, row: Mapping[str, str]) -> Card | None:
    """The card that a line names. Raises BadTable: no such card, and no time either."""
    name = row.get("card")
    if not name:
        if not row.get("compute_s"):
            raise BadTable(
                f"{where}: neither compute_s nor card; name the card, or measure the machine with"
                " loco-peer measure"
            )
        return None
    card = card_named(name)
    if card is None and not row.get("compute_s"):
        near = nearest_names(name)
        meant = f"; did you mean {' or '.join(near)}?" if near else "."
        raise BadTable(
            f"{where}: the table of cards has no '{name}'{meant} Known are {', '.join(CARDS)}."
            " Of any other machine write compute_s, as loco-peer measure prints it"
        )
    return card


def _number(where: str, row: Mapping[str, str], column: str, at_least: float) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise BadTable(f"{where}: {column} is '{row[column]}', not a number") from None
    if not (isfinite(value) and at_least <= value <= MAX_VALUE):
        raise BadTable(
            f"{where}: {column} is {row[column]}; it must be {at_least:g} to {MAX_VALUE:g}"
        )
    return value


def _count(where: str, row: Mapping[str, str], column: str) -> int:
    value = _number(where, row, column, 1)
    if value != int(value):
        raise BadTable(f"{where}: {column} is {row[column]}, not a whole number")
    return int(value)


def _rows(text: str, name: str, columns: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    header: list[str] | None = None
    for number, line in enumerate(text.removeprefix(BYTE_ORDER_MARK).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{name} line {number}"
        values = _values(where, line)
        if header is None:
            header = values
            _check_header(where, header, columns, optional)
        elif len(values) != len(header):
            raise BadTable(
                f"{where}: {len(values)} values, the first line names {len(header)} columns"
            )
        else:
            yield where, dict(zip(header, values, strict=True))
    if header is None:
        raise BadTable(f"{name}: empty; the first line is {','.join(columns)}")


def _values(where: str, line: str) -> list[str]:
    try:
        return [value.strip() for value in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise BadTable(f"{where}: {error}") from error


def _check_header(
    where: str, header: Sequence[str], columns: Sequence[str], optional: Sequence[str]
) -> None:
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        raise BadTable(f"{where}: columns are separated by commas: {','.join(columns)}")
    missing = [column for column in columns if column not in header]
    if columns is PEER_COLUMNS and not {"compute_s", "card"} & set(header):
        missing.append("compute_s or card")
    strange = [column for column in header if column not in (*columns, *optional)]
    if missing or strange or len(set(header)) != len(header):
        wrong = [f"no column {column}" for column in missing]
        wrong += [f"unknown column '{column}'" for column in strange]
        raise BadTable(
            f"{where}: {', '.join(wrong) or 'a column twice'}; the columns are"
            f" {','.join(columns)}{''.join(f'[,{o}]' for o in optional)}"
        )
