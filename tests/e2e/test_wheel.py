"""The wheel, as it is built from the source distribution, installed where no source is."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import swarm
from swarm import START_S, Peer, ending

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("peer", "protocol")
PAPERS: Final = ("pyproject.toml", "README.md", "LICENSE")
RELEASE: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SDIST: Final = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
INSTALL_S: Final = 3000.0
FIRST_START_S: Final = 600.0
"""For what reads all of torch from the disk, and compiles loops, on a busy machine."""
ROOM_BYTES: Final = 12e9
"""Of the disk: where pip finds no smaller build, torch comes with CUDA, 5.4 GB as installed."""
LOADS: Final = (
    "import sys; from transformers import AutoModelForCausalLM as model, AutoTokenizer as words;"
    "print(model.from_pretrained(sys.argv[1]).num_parameters());"
    "print(words.from_pretrained(sys.argv[1])('def')['input_ids'])"
)
DECOY: Final = "raise ImportError('the folder where a user starts was imported from')\n"

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def run(*command: str | Path, timeout_s: float = 600.0, **more) -> str:
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        **more,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def code() -> set[str]:
    """Files of the packages."""
    files = (file for name in PACKAGES for file in (ROOT / name).rglob("*"))
    kept = (file for file in files if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(ROOT).as_posix() for file in kept}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built elsewhere, so that nothing is left in the source; from the source distribution."""
    folder = tmp_path_factory.mktemp("build")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in PAPERS:
        shutil.copy(ROOT / name, folder)
    run(sys.executable, "-c", SDIST, folder / "sdist", cwd=folder)
    (sdist,) = (folder / "sdist").iterdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder / "wheel", source)
    (built,) = (folder / "wheel").iterdir()
    return built


def test_all_files_of_the_packages_are_in_it_and_no_others(wheel: Path) -> None:
    assert wheel.name == f"loco_peer-{RELEASE}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    papers = {name for name in names if ".dist-info/" in name}
    assert names - papers == code()
    ends = ("/LICENSE", "/uPlot-LICENSE", "/entry_points.txt")
    assert all(any(name.endswith(end) for name in papers) for end in ends)


# --- installed ------------------------------------------------------------------------------------
def interpreter(python: str) -> str | None:
    """One of this version that can make virtual environments; of pyenv's too."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"python{python}", *map(str, sorted(pyenv.glob(f"{python}.*/bin/python")))]
    says = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for each in candidates:
        if found := shutil.which(each):
            told = subprocess.run([found, "-c", says], capture_output=True, text=True, check=False)
            if told.stdout.strip() == python:
                return found
    return None


@pytest.fixture(scope="module", params=["3.11", "3.12", "3.13"])
def installed(wheel: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The programs of a new virtual environment that has the wheel and the pinned dependencies."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"no Python {request.param} here")
    if shutil.disk_usage(tempfile.gettempdir()).free < ROOM_BYTES:
        pytest.skip(f"less than {ROOM_BYTES / 1e9:.0f} GB free")
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        programs = Path(folder) / "bin"
        install = (
            programs / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            ROOT / "constraints.txt",
        )
        run(*install, wheel, timeout_s=INSTALL_S)
        yield programs


@pytest.fixture
def home(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[swarm.Swarm]:
    """A folder of the user's, in which something else is called like our packages."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(DECOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(swarm, "COMMAND", installed / "loco-peer")
    with swarm.open_swarm(tmp_path) as peers:
        yield peers


def trains(peer: Peer) -> bool:
    return bool(peer.status()["step"] >= 3)


@pytest.mark.long
def test_a_user_founds_a_run_looks_at_it_and_takes_the_model(
    home: swarm.Swarm, installed: Path, tmp_path: Path
) -> None:
    run(installed / "python", "-m", "pip", "check")
    assert home.loco("version").stdout.splitlines()[0] == f"loco-peer {RELEASE}"
    for preset in ("125m", "1b", "demo"):
        told = home.loco("new", "run.toml", "--preset", preset, "--force", timeout_s=START_S)
        assert told.returncode == 0, told.stderr
    with ending(home.launch("home", "start", "run.toml", "--grace", "100")) as peer:
        peer.wait_event(EventName.ROUND_OPENED, FIRST_START_S)
        page = peer.ready()["metrics"].removesuffix("metrics")
        peer.wait_for("steps", lambda: trains(peer), START_S)
        for name in (ROOT / "peer/observe/page").iterdir():
            path = "" if name.suffix == ".html" else name.name
            if name.suffix in (".html", ".css", ".js"):
                with urllib.request.urlopen(page + path, timeout=START_S) as answer:
                    assert answer.read() == name.read_bytes()
        assert json.loads(home.loco("status", "--json", "--home", "home").stdout)["step"] >= 3
        assert home.loco("leave", "--home", "home").returncode == 0
        assert peer.wait_exit(START_S) == ExitCode.OK
    told = home.loco("export", "--home", "home", "--hf", "model", timeout_s=FIRST_START_S)
    assert told.returncode == 0, told.stderr
    parameters, ids = run(installed / "python", "-c", LOADS, "model", cwd=tmp_path).splitlines()
    assert int(parameters) == 885_888
    assert len(json.loads(ids)) >= 3
