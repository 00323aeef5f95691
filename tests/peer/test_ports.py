"""One suite for real and simulated Disk, Work and Entropy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from peer.ports import Disk, Entropy, Work
from peer.ports.real import RealDisk, RealEntropy, RealWork
from peer.ports.simulated import SimulatedDisk, SimulatedEntropy, SimulatedWork
from protocol.errors import LocalProtocolError


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return RealDisk(tmp_path) if request.param == "real" else SimulatedDisk()


@pytest.fixture(params=[RealWork, SimulatedWork])
def work(request: pytest.FixtureRequest) -> Work:
    return request.param()


@pytest.fixture(params=[RealEntropy, lambda: SimulatedEntropy(1)])
def entropy(request: pytest.FixtureRequest) -> Entropy:
    return request.param()


def test_disk_gives_back_what_was_written_last(disk: Disk) -> None:
    path = Path("a/b")
    disk.write(path, b"one")
    disk.write(path, b"two")
    assert disk.read(path) == b"two"


def test_disk_appends_lines(disk: Disk) -> None:
    for line in (b"one", b"two"):
        disk.append_line(Path("log/x"), line)
    assert disk.read(Path("log/x")) == b"one\ntwo\n"


def test_disk_says_what_is_missing(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.read(Path("nothing"))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ""])
def test_disk_stays_inside(disk: Disk, path: str) -> None:
    for access in (disk.read, lambda p: disk.write(p, b""), lambda p: disk.append_line(p, b"")):
        with pytest.raises(LocalProtocolError):
            access(Path(path))


def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk(tmp_path)
    disk.write(Path("x"), b"old")

    def fail(*_args: object) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="fire"):
        disk.write(Path("x"), b"new")
    assert disk.read(Path("x")) == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


async def test_work_returns_and_raises(work: Work) -> None:
    assert await work.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await work.run(divmod, 1, 0)


async def test_work_does_not_block_the_loop(work: Work) -> None:
    order: list[str] = []

    async def other() -> None:
        order.append("other")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await work.run(lambda: None)
        order.append("work")
    assert order == ["other", "work"]


async def test_simulated_work_takes_virtual_time(autojump_clock: trio.testing.MockClock) -> None:
    before = trio.current_time()
    await SimulatedWork(duration_s=5).run(lambda: None)
    assert trio.current_time() - before == pytest.approx(5)


def test_entropy_never_repeats(entropy: Entropy) -> None:
    seen = {entropy.token_bytes(16) for _ in range(100)}
    assert len(seen) == 100
    assert all(len(token) == 16 for token in seen)


def test_simulated_entropy_follows_from_its_seed() -> None:
    draw: Callable[[int], list[bytes]] = lambda seed: [
        source.token_bytes(n) for source in [SimulatedEntropy(seed)] for n in (1, 7, 100)
    ]
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
