"""The world of a few steps that tests of the studies share."""

from dataclasses import replace

import pytest
from small_texts import small_texts

from bench.quality.settings import SMOKE
from bench.quality.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Text, a tiny model and 16 steps; nothing in it changes."""
    folder = tmp_path_factory.mktemp("texts")
    setting = replace(SMOKE, source=small_texts(folder, 40))
    return World.open(setting, 0, tmp_path_factory.mktemp("cache"))
