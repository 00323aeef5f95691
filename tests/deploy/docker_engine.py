"""A real Docker engine for tests: Debian's, unpacked and not installed, so no package script runs.

It has no bridge and no firewall rules of its own, so it disturbs no other engine. Containers meet
on networks that they are given. What it has built stays in CACHE, so a later run does the changed
layers again and no others.

There is no registry here, so a Debian 12 stands in for the base image, under its name: it has
Python 3.11, and pip's settings of this machine.
"""

import os
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dashboard import ROOT

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loco-peer-image"
PACKAGES: Final = ("docker.io", "containerd", "runc", "tini", "mmdebstrap")
BASE_PACKAGES: Final = "passwd,libstdc++6,python3,python3-venv,python-is-python3,ca-certificates"
SOURCES: Final = Path("/etc/apt/sources.list.d/debian.sources")
CA: Final = Path("/etc/ssl/certs/ca-certificates.crt")
PYTHON: Final = "3.11"
BASE: Final = f"python:{PYTHON}-slim"
BARE: Final = f"debian-with-python:{zlib.crc32(BASE_PACKAGES.encode()):08x}"
START_S: Final = 60
BUILD_S: Final = 3000
LIMITS: Final = ("--default-ulimit=nofile=4096:4096", "--default-ulimit=nproc=4096:4096")
"""The engine's own would raise limits, which not every machine lets it do."""


def missing() -> str | None:
    """The reason for which there can be no engine here; None where there can be one."""
    if os.getuid() != 0:
        return "an engine needs root"
    if not SOURCES.exists() or shutil.which("apt-get") is None:
        return "an engine is unpacked from packages of Debian 12"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "this kernel has no overlay file system"
    return None


def run(*command: str | Path, timeout_s: float = 600, **more: str) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=os.environ | more,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


@dataclass(frozen=True, slots=True)
class Docker:
    """A running engine, by its client."""

    program: Path
    host: str

    def start(self, *words: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=os.environ | {"DOCKER_HOST": self.host, "DOCKER_BUILDKIT": "1"},
        )

    def __call__(self, *words: str | Path, timeout_s: float = 120) -> str:
        done = self.start(*words, timeout_s=timeout_s)
        assert done.returncode == 0, (
            f"docker {words}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        )
        return done.stdout.strip()

    def inspect(self, what: str, form: str) -> str:
        return self("inspect", "--format", "{{" + form + "}}", what)


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.5)


def unpacked() -> Path:
    """The folder of the engine's programs. Raises AssertionError: packages cannot be had."""
    root = CACHE / "engine"
    if not (root / "usr/sbin/dockerd").exists():
        debs = CACHE / "debs"
        debs.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["apt-get", "download", "-q", *PACKAGES], cwd=debs, capture_output=True, check=True
        )
        for deb in debs.glob("*.deb"):
            run("dpkg", "-x", deb, root)
    return root / "usr"


def path() -> str:
    programs = unpacked()
    return f"{programs}/sbin:{programs}/bin:{os.environ['PATH']}"


@contextmanager
def running_engine(folder: Path) -> Iterator[Docker]:
    programs = unpacked()
    host = f"unix://{folder}/docker.sock"
    command: list[str | Path] = [
        *(programs / "sbin/dockerd", f"--host={host}", f"--pidfile={folder}/pid"),
        *(f"--data-root={CACHE}/data", f"--exec-root={folder}/exec"),
        *("--bridge=none", "--iptables=false", "--ip6tables=false", "--storage-driver=overlay2"),
        *LIMITS,
    ]
    docker = Docker(programs / "bin/docker", host)
    with (folder / "log").open("wb") as log:
        engine = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | {"PATH": path()},
            start_new_session=True,
        )
        try:
            wait_until("an engine", lambda: docker.start("version").returncode == 0, START_S)
            yield docker
        finally:
            engine.terminate()
            engine.wait(60)
            for mount in (folder / "exec/netns/default", folder / "exec"):
                subprocess.run(["umount", "-l", mount], capture_output=True, check=False)


def settings_of_pip() -> str:
    """Where pip finds certificates and wheels, as a pip.conf; no names of hosts."""
    told = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=True)
    pairs = (line.partition("=")[::2] for line in told.stdout.splitlines())
    kept = {key.rpartition(".")[2]: value.strip("'") for key, value in pairs}
    found = {key: kept[key] for key in ("cert", "find-links") if key in kept}
    return "\n".join(["[global]", *(f"{key} = {value}" for key, value in found.items())])


def make_base(docker: Docker) -> None:
    """The image that the Dockerfile builds on."""
    bare = CACHE / "base.tar"
    if docker.start("image", "inspect", BARE).returncode:
        perl, program = shutil.which("perl") or "perl", unpacked() / "bin/mmdebstrap"
        tar = bare.with_suffix(".new.tar")
        small = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "locale", "man")]
        what = ("--variant=essential", f"--include={BASE_PACKAGES}", "--dpkgopt=force-unsafe-io")
        run(perl, program, *what, *small, "bookworm", tar, SOURCES, PATH=path(), timeout_s=BUILD_S)
        tar.replace(bare)
        docker("import", bare, BARE, timeout_s=300)
        bare.unlink()
    context = CACHE / "base"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir()
    (context / "pip.conf").write_text(settings_of_pip())
    lines = [f"FROM {BARE}", "COPY pip.conf /etc/pip.conf"]
    if CA.exists():
        shutil.copy(CA, context / "ca.crt")
        lines.append(f"COPY ca.crt {CA}")
    folder = Path((settings_of_pip().partition("find-links = ")[2].splitlines() or ["/none"])[0])
    wheels = [w for w in folder.glob("*.whl") if f"cp{PYTHON.replace('.', '')}" in w.name]
    for wheel in wheels:
        shutil.copy(wheel, context / wheel.name)
        lines.append(f"COPY {wheel.name} {folder}/")
    (context / "Dockerfile").write_text("\n".join(lines))
    docker("build", "--network=host", "-q", "-t", BASE, context, timeout_s=300)


def build(docker: Docker, tag: str) -> None:
    make_base(docker)
    arguments = (f"--build-arg=PYTHON={PYTHON}", "--build-arg=TORCH=cpu")
    docker("build", "--network=host", *arguments, "-t", tag, ROOT, timeout_s=BUILD_S)
