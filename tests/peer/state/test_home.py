"""The home: one daemon, one run, and everything still there after a crash."""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peer.runtime.files import replace_file
from peer.state.home import (
    LONGEST_SOCKET_NAME_BYTES,
    Home,
    HomeError,
    HomeInUse,
    OtherRun,
)
from protocol.address.multiaddr import MAX_UNIX_PATH_BYTES
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short path: pytest's own leave no room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="loco-test-") as path:
        yield Path(path)


@pytest.fixture
def home(tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    made = Home(tmp_path / "home")
    made.prepare()
    return made


def signed(seed: int) -> SignedSpec:
    founder = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
    return SignedSpec.signed_by(
        RunSpec(seed=seed), founder.public_key().public_bytes_raw(), founder.sign
    )


def test_home_is_private_and_made_whole(home: Home) -> None:
    assert home.root.stat().st_mode & 0o777 == 0o700
    assert home.state_dir.is_dir()
    assert home.cache_dir.is_dir()
    assert home.log_dir.is_dir()
    home.prepare()


def test_one_daemon_per_home(home: Home) -> None:
    with home.locked():
        assert home.in_use()
        with (
            pytest.raises(HomeInUse, match=f"pid {os.getpid()}") as caught,
            Home(home.root).locked(),
        ):
            pass
        assert f"the daemon with pid {os.getpid()};" in str(caught.value)
    assert not home.in_use()
    with home.locked():
        pass


@pytest.mark.slow
def test_a_killed_daemon_does_not_hold_its_home(home: Home) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom peer.state.home import Home\n"
        "with Home(Path(sys.argv[1])).locked():\n"
        "    print('held', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(home.root)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(HomeInUse) as caught, home.locked():
            pass
        assert f"the daemon with pid {holder.pid};" in str(caught.value)
        holder.kill()
    with home.locked():
        pass


def test_a_client_finds_the_control_socket_in_another_environment(
    home: Home, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sockets / "other").mkdir()
    with home.locked():
        told = home.control_socket
        assert told.parent.is_dir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets / "other"))
        assert Home(home.root).control_socket == told
        assert Home(home.root).runtime_dir != told.parent
    assert not told.parent.exists()


def test_socket_paths_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(long))
    made = Home(tmp_path / ("h" * 200))._make_runtime_dir()
    try:
        socket = made / ("s" * LONGEST_SOCKET_NAME_BYTES)
        assert len(os.fsencode(socket)) <= MAX_UNIX_PATH_BYTES
        assert made.stat().st_mode & 0o777 == 0o700
    finally:
        made.rmdir()


def test_a_home_that_everybody_can_write_to_is_refused(home: Home) -> None:
    for mode in (0o755, 0o775):
        home.root.chmod(mode)
        home.prepare()
    home.root.chmod(0o777)
    with pytest.raises(HomeError, match="every user.*chmod o-w"):
        home.prepare()


@pytest.mark.parametrize("taken", ["open", "link", "dangling", "file"])
def test_sockets_lie_elsewhere_where_their_place_is_none_of_ours(
    home: Home, tmp_path: Path, taken: str
) -> None:
    place = home.runtime_dir
    match taken:
        case "open":
            place.mkdir(0o755)
        case "link":
            place.symlink_to(tmp_path)
        case "dangling":
            place.symlink_to(tmp_path / "nowhere")
        case _:
            place.touch()
    with home.locked():
        assert home.sockets != place
        assert home.sockets.stat().st_mode & 0o777 == 0o700
        socket = home.sockets / ("s" * LONGEST_SOCKET_NAME_BYTES)
        assert len(os.fsencode(socket)) <= MAX_UNIX_PATH_BYTES
        assert Home(home.root).control_socket.parent == home.sockets
    assert not home.sockets.exists()
    assert os.path.lexists(place)


def test_incarnations_count_up_across_restarts(home: Home) -> None:
    assert [home.next_incarnation(), home.next_incarnation()] == [1, 2]
    assert Home(home.root).next_incarnation() == 3


def test_a_damaged_incarnation_is_not_started_over(home: Home) -> None:
    home.incarnation_path.write_text("many")
    with pytest.raises(HomeError, match="damaged"):
        home.next_incarnation()


def test_ports_are_kept(home: Home) -> None:
    assert home.kept_port("listen") is None
    home.keep_port("listen", 31337)
    home.keep_port("metrics", 9100)
    again = Home(home.root)
    assert (again.kept_port("listen"), again.kept_port("metrics")) == (31337, 9100)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"listen": "x"}', '{"listen": 70000}', '{"listen": 0}']
)
def test_a_damaged_port_is_no_port_and_is_kept_anew(home: Home, text: str) -> None:
    home.ports_path.write_text(text)
    assert home.kept_port("listen") is None
    home.keep_port("listen", 4000)
    assert home.kept_port("listen") == 4000


def test_a_move_to_another_stage_counts_once(home: Home) -> None:
    assert home.take_next_part() == ""
    for part in ("stage/2", "expert/1"):
        home.go_over_to(part)
        assert Home(home.root).take_next_part() == part
        assert home.take_next_part() == ""
    home.next_part_path.write_bytes(b"two")
    assert home.take_next_part() == ""


def test_one_run_per_home(home: Home) -> None:
    assert home.run() is None
    home.bind_run(signed(1))
    home.bind_run(signed(1))
    assert Home(home.root).run() == signed(1)
    with pytest.raises(OtherRun, match=signed(2).run_id):
        home.bind_run(signed(2))
    assert home.run() == signed(1)


@pytest.mark.parametrize(
    "change", [lambda t: t[:-20], lambda t: t.replace('\\"seed\\":1', '\\"seed\\":2')]
)
def test_a_damaged_run_file_is_refused(home: Home, change) -> None:
    home.bind_run(signed(1))
    text = home.run_path.read_text()
    assert change(text) != text
    home.run_path.write_text(change(text))
    with pytest.raises(HomeError, match="damaged"):
        home.run()


FILES_OF_A_RUN = ("checkpoints/000001-step-50/manifest.json", "admission", "founder.key")


class Killed(BaseException): ...


def killed_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """End the process, as it were, at one of the changes of names that come now."""
    calls = itertools.count()

    def counted(change: Callable[..., object]) -> Callable[..., object]:
        def made(*args: Any) -> object:
            if next(calls) == call:
                raise Killed
            return change(*args)

        return made

    for name in ("replace", "rename", "unlink", "rmdir"):
        patch.setattr(Path, name, counted(getattr(Path, name)))
    patch.setattr("peer.state.home.replace_file", counted(replace_file))


def has_files(folder: Path) -> bool:
    there = [(folder / name).exists() for name in FILES_OF_A_RUN]
    assert len(set(there)) == 1, "all of them are in one place"
    return there[0]


@pytest.mark.parametrize("successor", [None, signed(2)], ids=["new run", "successor"])
@pytest.mark.parametrize("again", [None, 0, 1, 2, 3])
def test_a_move_to_another_run_that_is_cut_off_is_taken_back_or_ended(
    home: Home, successor: SignedSpec | None, again: int | None
) -> None:
    """Killed at each change of a name, and `again` while the next start sets that right."""
    old = signed(1)
    home.bind_run(old)
    for name in FILES_OF_A_RUN:
        (home.root / name).parent.mkdir(exist_ok=True, parents=True)
        (home.root / name).touch()
    for call in itertools.count():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            killed_at(call, patch)
            home.put_run_away(successor)
        if again is not None:
            with pytest.MonkeyPatch.context() as patch, suppress(Killed):
                killed_at(again, patch)
                with home.locked():
                    pass
        with home.locked():
            is_old = home.run() == old
            assert is_old == has_files(home.root)
            if not is_old:
                break
    assert call > len(FILES_OF_A_RUN), "all but the last change are taken back"
    assert home.run() == successor
    assert has_files(place := home.old_runs_dir / old.run_id)
    assert (place / "run.json").is_file()


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HomeError, match="cannot be used: File exists"):
        Home(tmp_path / "file").prepare()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_home_of_another_user_is_refused_with_what_to_do(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    program = (
        "import os, sys; from pathlib import Path; from peer.state.home import Home\n"
        "os.setgid(1000); os.setuid(1000); Home(Path(sys.argv[1])).prepare()"
    )
    for above in tmp_path.parents:
        if above.stat().st_uid == 0 and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)
    ran = subprocess.run(
        [sys.executable, "-c", program, str(volume)], capture_output=True, text=True, check=False
    )
    assert "Permission denied" in ran.stderr
    assert "it belongs to user 0 and this is user 1000: chown it to 1000" in ran.stderr
    assert "fsGroup: 1000" in ran.stderr


def test_how_long_a_home_is_held_is_known(home: Home) -> None:
    assert home.held_s() == 0.0
    with home.locked():
        assert 0.0 <= home.held_s() < 60.0


def test_a_home_on_a_disk_that_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_arguments: object) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(HomeError, match="No space left on device"):
        Home(tmp_path / "home").prepare()


def test_a_file_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file(tmp_path / "x", b"old")

    def fail(*_args: object) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="fire"):
        replace_file(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
