"""One swarm for all tests of this folder."""

from collections.abc import Iterator

import pytest
from swarm import Swarm


@pytest.fixture(scope="session")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path_factory.mktemp("swarm"))
    try:
        swarm.found()
        yield swarm
    finally:
        swarm.close()
