"""What a run of the tests has left out stands in its last lines."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_one(): pass

@pytest.mark.long
@pytest.mark.parametrize("n", [1, 2])
def test_two(n): pass

@pytest.mark.parametrize("n", [1, 2])
def test_three(n): pytest.skip("no such server here")

@pytest.mark.skip(reason="another machine")
def test_four(): pass
"""
LONG = "left out: 2 tests marked long; run them with make test PYTEST='-m long'"
SKIPPED = {
    "left out: 2 tests skipped: no such server here",
    "left out: 1 test skipped: another machine",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-m", "not long"], {LONG, *SKIPPED}),
        (["-m", "not long", "-n", "2"], {LONG, *SKIPPED}),
        ([], SKIPPED),
        pytest.param(["-m", "long"], set(), marks=pytest.mark.long),
        pytest.param(["-k", "one"], set(), marks=pytest.mark.long),
    ],
)
def test_a_run_says_what_it_leaves_out(tmp_path, options, expected):
    for name in ("conftest.py", "left_out.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long: or not\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    said = {line for line in done.stdout.splitlines() if line.startswith("left out")}
    assert said == expected
