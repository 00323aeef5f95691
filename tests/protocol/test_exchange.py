"""Two sides of an exchange joined by a wire that may break at any point."""

import itertools
from functools import partial

import pytest

from protocol.gossip.exchange import ExchangeSide, exchange_id
from protocol.gossip.matchmaking import pair_rank
from protocol.outcomes import SkipReason
from protocol.wire.messages import Received, decode_message, encode_message

ENDS = [
    SkipReason.BAD_VECTOR,
    SkipReason.OWN_MISTAKE,
    SkipReason.PARTNER_LOST,
    SkipReason.PARTNER_STALLED,
    SkipReason.DEADLINE,
]


class Pair:
    """Two sides and the four messages between them: two vectors, two receipts."""

    def __init__(self) -> None:
        self.sides = (ExchangeSide(), ExchangeSide())
        self.vectors, self.receipts = [0, 1], list[int]()

    @property
    def in_flight(self):
        """What may come next."""
        vectors = [partial(self.vector_comes, each) for each in self.vectors]
        return [*vectors, *(partial(self.receipt_comes, each) for each in self.receipts)]

    def vector_comes(self, receiver: int) -> None:
        self.vectors.remove(receiver)
        self.sides[receiver].holds = True
        self.receipts.append(1 - receiver)

    def receipt_comes(self, receiver: int) -> None:
        self.receipts.remove(receiver)
        self.sides[receiver].delivered = True


@pytest.mark.parametrize("lost_after", range(5))
def test_both_sides_end_alike_unless_the_stream_breaks_under_a_receipt(lost_after: int) -> None:
    for choices in itertools.product(range(4), repeat=lost_after):
        pair = Pair()
        for choice in choices:
            if pair.in_flight:
                pair.in_flight[choice % len(pair.in_flight)]()
        for side in pair.sides:
            side.failed(SkipReason.PARTNER_LOST)
        assert all(side.is_final for side in pair.sides)
        if pair.sides[0].is_averaged != pair.sides[1].is_averaged:
            assert (len(pair.receipts), pair.vectors) == (1, []), choices
            assert pair.sides[pair.receipts[0]].reason is SkipReason.UNSETTLED


def test_a_whole_exchange_is_averaged_on_both_sides() -> None:
    pair = Pair()
    while pair.in_flight:
        pair.in_flight[0]()
    assert all(side.is_averaged for side in pair.sides)


@pytest.mark.parametrize("delivered", [False, True])
@pytest.mark.parametrize("reason", ENDS)
def test_every_early_end_has_its_reason(reason: SkipReason, delivered: bool) -> None:
    exchange = ExchangeSide()
    if delivered:
        exchange.delivered = True
    assert not exchange.is_final
    exchange.failed(reason)
    assert (exchange.is_averaged, exchange.reason) == (False, reason)


@pytest.mark.parametrize("reason", ENDS)
def test_holding_without_a_receipt_is_unsettled(reason: SkipReason) -> None:
    exchange = ExchangeSide()
    exchange.holds = True
    exchange.failed(reason)
    assert exchange.reason is SkipReason.UNSETTLED


def test_what_comes_after_the_end_changes_nothing() -> None:
    exchange = ExchangeSide()
    exchange.failed(SkipReason.PARTNER_LOST)
    exchange.holds = True
    exchange.delivered = True
    exchange.failed(SkipReason.DEADLINE)
    assert (exchange.is_averaged, exchange.reason) == (False, SkipReason.PARTNER_LOST)
    averaged = ExchangeSide()
    averaged.holds = True
    averaged.delivered = True
    averaged.failed(SkipReason.DEADLINE)
    assert (averaged.is_averaged, averaged.reason) == (True, None)


# --- the name of an exchange ----------------------------------------------------------------------
def test_the_name_of_an_exchange_is_the_same_for_both_and_new_with_every_round_of_either() -> None:
    assert exchange_id("group", ("a", 3), ("b", 9)) == exchange_id("group", ("b", 9), ("a", 3))
    names = {
        exchange_id("group", ("a", mine), (other, theirs))
        for mine in (3, 4)
        for theirs in (3, 8, 9)
        for other in "bc"
    }
    assert len(names) == 12
    assert exchange_id("another", ("a", 3), ("b", 9)) not in names


def test_a_name_goes_into_a_message_and_tells_nothing_of_the_rank() -> None:
    name = exchange_id("group", ("a", 3), ("b", 9))
    assert decode_message(encode_message(Received(name, name))) == Received(name, name)
    assert name != pair_rank("group", ("a", 3), ("b", 9)).hex()
