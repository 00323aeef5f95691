"""The two tables of `loco-peer plan`: machines on offer, and links between them.

    peers    peer,location,price_per_hour, then compute_s or card; if you like, slots, memory_gb
    links    a,b,latency_ms,bandwidth_mbps; one way, from a to b

`compute_s` is the forward pass of one microbatch through the whole model; where it is not given it
is estimated for the `card` (cards.py). `slots` says how many microbatches the machine can hold of
one stage. The first line names the columns, in any order;
empty lines and lines that begin with # are passed over. A pair without a link is looked up by its
locations in the table of regions; where that does not know them, the link of the other way counts.
Every error names its line.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final

from protocol.errors import LocoError

from .cards import CARDS, Card, card_named, nearest_names
from .problem import MAX_PEERS, THOUSAND, US_PER_S, Matrix
from .regions import REGIONS, SAME_PLACE, RegionLink, line_between

PEER_COLUMNS: Final = ("peer", "location", "price_per_hour")
OPTIONAL_PEER_COLUMNS: Final = ("compute_s", "card", "slots", "memory_gb")
USUAL_SLOTS: Final = 4
"""Slots of a machine whose line does not say."""
LINK_COLUMNS: Final = ("a", "b", "latency_ms", "bandwidth_mbps")
BITS: Final = 8
GB: Final = 10**9
BYTE_ORDER_MARK: Final = "\ufeff"
"""Some spreadsheets begin a file with it."""
MAX_VALUE: Final = 1e9
Row = tuple[str, Mapping[str, str]]
"""Where a line stands, and its values by column."""


class BadTable(LocoError):
    """A table cannot be used; the message names the line and says what is wrong."""


@dataclass(frozen=True, slots=True)
class MachineOffer:
    """A machine that could take part.

    Attributes:
        compute_us: forward of one microbatch through the whole model.
        memory_bytes: of its device; None where the table does not say.
        card: its name, where the time was estimated from that; None where the table has the time.
        where: the line of the table that says so, for messages.
    """

    name: str
    location: str
    compute_us: int
    slots: int
    price_per_hour: float
    memory_bytes: int | None = None
    card: str | None = None
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
    """Read the table of links.

    Raises:
        BadTable
    """
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
        rate = round(mbps * US_PER_S / BITS)
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
    """What is said of pairs of which nothing is known."""
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
        memory = round(_number(where, row, "memory_gb", 0) * GB)
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
        where,
    )


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
