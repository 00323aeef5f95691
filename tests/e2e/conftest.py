"""One swarm for all tests of this folder."""

from collections.abc import Iterator

import pytest
from swarm import Swarm, open_swarm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the swarm comes last: its peers keep the processors busy until the end."""
    items.sort(key=lambda item: "swarm" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with open_swarm(tmp_path_factory.mktemp("swarm")) as swarm:
        swarm.found()
        yield swarm
