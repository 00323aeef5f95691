"""One swarm for all tests of this folder."""

import signal
from collections.abc import Iterator

import pytest
from swarm import Swarm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the swarm comes last: its peers keep the processors busy until the end."""
    items.sort(key=lambda item: "swarm" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path_factory.mktemp("swarm"))
    # Whoever ends the tests, as a time limit does, ends the swarm with them.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        swarm.found()
        yield swarm
    finally:
        swarm.close()
        signal.signal(signal.SIGTERM, before)
