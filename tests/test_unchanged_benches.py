"""Which tests of benches `.ci/run` leaves out."""

import pytest
from unchanged_benches import TESTS, unchanged

pytestmark = pytest.mark.slow


def names(*changed: str) -> set[str]:
    return {path.stem.removeprefix("test_") for path in unchanged(changed)}


def test_a_document_changes_no_bench_but_those_with_processes_stay() -> None:
    assert len(names("docs/open.md")) > 20
    assert not names("docs/open.md") & {"router", "shaped_network"}


def test_what_a_bench_imports_keeps_it_however_far_away_it_is() -> None:
    left_out = names("peer/averaging/gossip/exchange_session.py", "tests/peer/test_imports.py")
    assert "study" not in left_out
    assert "latency_model" in left_out
    assert "latency_model" not in names("bench/latency_model.py")
    assert "pipeline_learning" not in names("peer/training/__init__.py")
    assert "lone_tokens" not in names("demo/reading.py")
    assert "dashboard_pictures" not in names("deploy/grafana/dashboards/peer.json")


@pytest.mark.parametrize(
    "name",
    [
        "constraints.txt",
        "tests/bench/small_texts.py",
        "peer/daemon/was_here.py",
        "peer/observe/page/page.js",
        ".ci/run",
    ],
)
def test_what_is_no_module_keeps_all(name: str) -> None:
    assert names(name) == set()
    assert list(TESTS.glob("test_*.py"))
