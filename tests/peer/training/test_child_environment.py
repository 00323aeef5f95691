"""What a trainer's process is told about threads and memory."""

import subprocess
import sys

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


STEPS = """
import resource, torch
torch.set_num_threads(1)
weights = [torch.zeros(768, 1024, requires_grad=True) for _ in range(8)]
for weight in weights:
    weight.grad = torch.zeros_like(weight)
x = torch.ones(64, 768)
for step in range(30):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    sum((x @ weight).square().sum() for weight in weights).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_a_step_takes_no_memory_anew():
    told = [sys.executable, "-c", STEPS]
    done = subprocess.run(told, env=_environment(1), capture_output=True, check=True)
    assert int(done.stdout) < 3 * 768  # pages of so many gradients, in 20 steps of eight each


def test_how_users_have_memory_kept_is_left(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    assert _environment(2)["MALLOC_TRIM_THRESHOLD_"] == "7"
