"""How many pieces may be on their way at once."""

from protocol.content.scheduler import MORE_EVERY_S, AtOnce

MOST = 8


def test_a_fast_line_has_all_after_as_many_pieces() -> None:
    line = AtOnce(MOST)
    assert line.limit(0.0) == 1
    for count in range(1, 2 * MOST):
        line.began(0.1 * count)
        assert line.has_room(0.1 * count) == (line.limit(0.1 * count) > 1)
        line.came(0.1 * count)
        assert line.limit(0.1 * count) == min(MOST, 1 + count)


def test_slow_pieces_are_joined_by_others_one_by_one() -> None:
    line = AtOnce(MOST)
    line.began(5.0)
    assert not line.has_room(5.0 + MORE_EVERY_S - 1)
    assert line.has_room(5.0 + MORE_EVERY_S)
    line.began(5.0 + MORE_EVERY_S)
    assert not line.has_room(5.0 + MORE_EVERY_S)
    assert line.limit(5.0 + 100 * MORE_EVERY_S) == MOST


def test_it_begins_anew_after_a_loss_and_after_a_calm() -> None:
    line = AtOnce(MOST)
    for _ in range(3):
        line.began(1.0)
        line.came(1.0)
    line.began(2.0)
    line.refused(3.0)
    assert line.limit(3.0) == 4
    line.began(3.0)
    line.lost(4.0)
    assert line.limit(4.0) == 1
    line.began(4.0)
    line.came(5.0)
    assert line.limit(5.0) == 2
    assert line.limit(5.0 + MORE_EVERY_S) == 1
