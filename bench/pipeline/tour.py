"""The shortest closed tour from place 0 through all others (Held and Karp 1962)."""

from collections.abc import Sequence


def shortest_tour(prices: Sequence[Sequence[int]]) -> tuple[int, tuple[int, ...]]:
    """Its length, and the places in order, 0 first.

    For every set of places, the cheapest way to each of them as the last is kept.
    """
    number = len(prices)
    ends: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {
        (1 << place, place): (prices[0][place], (0, place)) for place in range(1, number)
    }
    for _ in range(number - 2):
        longer: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        for (been, last), (length, order) in ends.items():
            row = prices[last]
            for place in range(1, number):
                if been >> place & 1:
                    continue
                key, total = (been | 1 << place, place), length + row[place]
                if key not in longer or total < longer[key][0]:
                    longer[key] = (total, (*order, place))
        ends = longer
    return min((length + prices[last][0], order) for (_, last), (length, order) in ends.items())
