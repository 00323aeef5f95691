"""How far things walk through the code may fall, and not rise."""

from typing import Final

import pytest
from traces import Walk
from walks import WORLDS, traced

pytestmark = pytest.mark.slow

MOST: Final = {
    "a vector in pairs": Walk(files=51, functions=426, crossings=141, types=34),
    "a fragment": Walk(files=58, functions=529, crossings=176, types=38),
    "a microbatch": Walk(files=21, functions=133, crossings=43, types=12),
    "a chunk of the state": Walk(files=13, functions=73, crossings=14, types=3),
}
"""As `python -m tests.pins paths` tells them. A shorter walk lowers its numbers; the commit that
raises one says why."""


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
