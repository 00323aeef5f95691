"""For all tests."""

import gc

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from left_out import (
    pytest_configure,
    pytest_deselected,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

__all__ = [
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_deselected",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
]

# The same examples every time, however busy the machine is: a red test is red again.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")
# Nor do they depend on which of our modules earlier tests have imported, whose constants it draws.
providers._get_local_constants = providers.Constants


def pytest_collection_finish() -> None:
    """What has been imported and collected stays: the collector need not look through it again."""
    gc.collect()
    gc.freeze()
