"""One swarm for all tests of this folder, and the browser of those that look at a page."""

import shutil
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Final

import pytest
from swarm import NUM_ROUNDS_ALONE, Swarm, open_swarm

BY_PEERS: Final = (
    "test_bad_input",
    "test_other_versions",
    "test_good_day",
    "test_doctor_of_a_run",
    "test_rented",
    "test_hostile",
    "test_late_joiner",
    "test_paused_peer",
    "test_swarm_export",
    "test_scraped_swarm",
    "test_watched",
    "test_comebacks",
    "test_kills",
)
"""Files that use the swarm, by how many peers they need, fewest first: so the fewest are started,
and the fewest run at a time."""


def order_of(item: pytest.Item) -> int:
    """What uses the swarm comes last: its peers keep the processors busy until the end."""
    if "swarm" not in getattr(item, "fixturenames", ()):
        return -1
    name = item.path.stem
    return BY_PEERS.index(name) if name in BY_PEERS else len(BY_PEERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=order_of)


def together(nodeid: str) -> str:
    """What one worker runs: all that use the swarm, or the tests of a file."""
    name = PurePath(nodeid.partition("::")[0]).stem
    return "swarm" if name in BY_PEERS else name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = together
    return scheduler


@pytest.fixture(scope="session")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with open_swarm(tmp_path_factory.mktemp("swarm")) as swarm:
        swarm.found(NUM_ROUNDS_ALONE)
        yield swarm


FLAGS: Final = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no browser is driven without it: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()
