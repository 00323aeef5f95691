"""What a trainer's process is told about threads."""

import pytest

from peer.training.child_process import SPIN_COUNT, _environment


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_threads_spin_for_a_moment_only():
    assert _environment(2)["GOMP_SPINCOUNT"] == SPIN_COUNT
    assert _environment(2)["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in _environment(0)


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")]
)
def test_how_users_have_them_wait_is_left(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert _environment(2)[name] == value
    assert _environment(2).get("GOMP_SPINCOUNT") != SPIN_COUNT
