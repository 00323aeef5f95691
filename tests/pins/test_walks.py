"""How far things walk through the code may fall, and not rise."""

from typing import Final

import pytest
from walks import WORLDS, Walk, traced

pytestmark = pytest.mark.slow

MOST: Final = {
    "a vector in pairs": Walk(files=63, functions=486, crossings=146, types=47),
    "a fragment": Walk(files=74, functions=584, crossings=190, types=48),
    "a microbatch": Walk(files=29, functions=173, crossings=58, types=14),
    "a chunk of the state": Walk(files=16, functions=88, crossings=19, types=6),
}
"""As `python -m tests.pins paths` tells them. A shorter walk lowers its numbers; none is raised."""


def test_every_walk_is_bounded():
    assert MOST.keys() == WORLDS.keys()


@pytest.mark.parametrize("name", WORLDS)
def test_no_walk_is_longer_than_it_was(name):
    found = traced(name).walk
    assert min(found) > 0
    longer = {
        field: number
        for field, number in found._asdict().items()
        if number > getattr(MOST[name], field)
    }
    assert longer == {}
