"""A run of the tests says at its end what it has left out, and how to run it: a pytest plugin.

With several processes (pytest-xdist) each worker collects all tests, and tells the first process,
which speaks for them, what it deselected.
"""

from collections import Counter
from typing import Any

import pytest

LONG = pytest.StashKey[int]()
HOW = "run them with make test PYTEST='-m long'"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LONG] = 0


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        chosen = item.config.getoption("keyword")  # whoever names tests knows what is left out
        item.config.stash[LONG] += not chosen and item.get_closest_marker("long") is not None


def pytest_sessionfinish(session: pytest.Session) -> None:
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["long"] = session.config.stash[LONG]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {})
    node.config.stash[LONG] = max(node.config.stash[LONG], told.get("long", 0))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if num_long := config.stash[LONG]:
        terminalreporter.write_line(f"left out: {_tests(num_long)} marked long; {HOW}")
    skipped = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    for reason, count in skipped.items():
        terminalreporter.write_line(f"left out: {_tests(count)} skipped: {reason}")


def _tests(count: int) -> str:
    return f"{count} test{'s' if count > 1 else ''}"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Of a skip: the last of path, line and reason."""
    said = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return said.removeprefix("Skipped: ")
