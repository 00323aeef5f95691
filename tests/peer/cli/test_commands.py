"""The commands as a person types them, right and wrong: what is printed, and the exit code."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from typer.testing import CliRunner, Result

from peer.cli.app import app, exit_code_of
from peer.cli.client import _leave
from peer.facts import PeerState
from peer.network.p2pd import CannotListen, held_ports
from peer.observe.control import serve_control
from peer.observe.status import Status
from peer.options.config import PeerConfig
from peer.options.exit_codes import ExitCode
from peer.state.home import Home
from peer.training.ports import CannotTrain
from protocol.errors import Refused, StreamLost
from protocol.outcomes import RefusalReason
from protocol.run.run_spec import RunSpec


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("LOCO_")]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="loco-test-") as sockets:
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        monkeypatch.setenv("LOCO_HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)
        yield


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands where the daemon would: remembers what it was given, and does as told."""
    fake = types.SimpleNamespace(calls=[], raises=None, code=ExitCode.OK)

    async def run_daemon(config: PeerConfig, spec: RunSpec | None, home: Home, spare) -> ExitCode:
        fake.calls.append((config, spec, home, home.in_use()))
        fake.spare_threads = spare
        if fake.raises is not None:
            async with trio.open_nursery():
                raise fake.raises
        return fake.code

    module: Any = types.ModuleType("peer.daemon.run")
    module.run_daemon = run_daemon
    monkeypatch.setitem(sys.modules, "peer.daemon.run", module)
    monkeypatch.setattr("peer.cli.run.spare_child", nullcontext)
    return fake


def loco(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_toml(text: str = "seed = 5\n") -> str:
    Path("run.toml").write_text(text)
    return "run.toml"


def first_line(folder: Path) -> str:
    """What `start` and `join` say before all else."""
    return f"loco-peer {version('loco-peer')}: starting in {folder / 'home'}\n"


# --- start and join -------------------------------------------------------------------------------


def test_start_gives_the_daemon_a_spec_and_a_locked_home(daemon, tmp_path: Path) -> None:
    result = loco("start", run_toml(), "--threads", "2", "--metrics", "127.0.0.1:9", "--json-ready")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"{first_line(tmp_path)}  run run\n  model   885.9k parameters")
    [(config, spec, home, locked)] = daemon.calls
    assert spec == RunSpec(seed=5)
    assert (home.root, locked) == (tmp_path / "home", True)
    assert (config.threads, config.metrics.port, config.json_ready) == (2, 9, True)
    assert daemon.spare_threads == 2
    assert not home.in_use()


def test_join_takes_every_address(daemon) -> None:
    assert loco("join", "--bootstrap", "a:1", "--bootstrap", "b:2").exit_code == 0
    [(config, spec, _home, _locked)] = daemon.calls
    assert spec is None
    assert config.bootstrap == ("a:1", "b:2")


def test_lines_of_json_are_not_mixed_with_others(daemon) -> None:
    result = loco("join", "--bootstrap", "a:1", "--log-format", "json")
    assert (result.exit_code, result.stderr) == (0, "")


def test_verbose_shows_which_place_won(daemon) -> None:
    result = loco("join", "--bootstrap", "a:1", "-v")
    assert "bootstrap = a:1 (command line)" in result.stderr
    assert "grace = 8.0 (default)" in result.stderr


def test_the_daemons_code_is_the_commands(daemon) -> None:
    daemon.code = ExitCode.TERMINATED
    assert loco("join", "--bootstrap", "a:1").exit_code == 143


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (Refused(RefusalReason.OTHER_RUN, "that is another run"), 3, "that is another run"),
        (StreamLost("the disk of the swarm"), 1, "the disk of the swarm"),
        (CannotTrain("there is no such device"), 2, "there is no such device"),
    ],
)
def test_errors_are_one_sentence_and_a_code(
    daemon, tmp_path: Path, error, code: int, sentence: str
) -> None:
    daemon.raises = error
    result = loco("join", "--bootstrap", "a:1")
    said = f"{first_line(tmp_path)}loco-peer: {sentence}\n"
    assert (result.exit_code, result.stderr) == (code, said)


def test_verbose_adds_the_traceback(daemon) -> None:
    daemon.raises = StreamLost("gone")
    result = loco("join", "--bootstrap", "a:1", "-v")
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("loco-peer: gone\n")


def test_a_bug_is_called_a_bug(daemon) -> None:
    daemon.raises = ZeroDivisionError("oops")
    result = loco("join", "--bootstrap", "a:1")
    assert result.exit_code == 1
    assert "ZeroDivisionError: oops" in result.stderr
    assert "this is a bug in loco-peer" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["start", "missing.toml"], "missing.toml does not exist; loco-peer new missing.toml"),
        (["start", "."], ". is a folder, as Docker makes it where a file to mount is missing"),
        (["start", "run.toml", "--device", "tpu"], "--device: use 'cpu', 'cuda' or 'cuda:N'"),
        (["start", "run.toml", "--threads", "0"], "--threads: must be from 1"),
        (["start", "run.toml", "--gpus", "0"], "--gpus: use 'all', how many (from 1), or which"),
        (["start", "run.toml", "--gpus", "1,1"], "--gpus: name each GPU once"),
        (["start", "run.toml", "--gpus", "9", "--device", "cpu"], "has 8 sequences"),
        (["start", "run.toml", "--split-context"], "give --gpus all, or a number above 1"),
        (
            ["start", "run.toml", "--split-context", "--gpus", "5", "--device", "cpu"],
            "heads of attention cannot be divided by 5; give --gpus a divisor",
        ),
        (["start", "run.toml", "--shard-weights"], "needs several GPUs of this machine"),
        (["start", "run.toml", "--shard-weights", "--gpus", "1"], "needs several GPUs"),
        (
            ["start", "run.toml", "--split-context", "--gpus", "1"],
            "needs several GPUs of this machine; give --gpus all, or a number above 1",
        ),
        (["start", "run.toml", "--overlap-steps", "-1"], "--overlap-steps: must be from 0"),
        (["start", "run.toml", "--stage", "1"], "No such option: --stage"),
        (["start", "run.toml", "--overlap-steps", "2"], "this run waits for no fragments"),
        (["start", "run.toml", "--grace", "-1"], "--grace: must be from 0"),
        (["start", "run.toml", "--log-format", "xml"], "--log-format: use 'console' or 'json'"),
        (["start", "run.toml", "--listen", "x"], "--listen"),
        (["start", "run.toml", "--announce", "h:0"], "port 0 cannot be announced"),
        (["start", "run.toml", "--home", "run.toml"], "cannot be used: File exists"),
        (["start", "run.toml", "--home", "/proc/loco"], "cannot be used"),
        (["join", "--bootstrap", "a:1", "--stage", "64"], "--stage: must be from 0 to 63"),
        (["join"], "join needs the address of a peer"),
        (["join", "--bootstrap", "1.2.3.4"], "give a host and the port"),
        (["new", "run.toml"], "run.toml exists already"),
        (["new", "x.toml", "--preset", "huge"], "unknown preset 'huge'"),
        (["new", "/proc/x/run.toml"], "cannot write /proc/x/run.toml"),
    ],
)
def test_wrong_usage_is_told_and_is_2(daemon, arguments: list[str], sentence: str) -> None:
    run_toml()
    result = loco(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert not daemon.calls


def test_a_founder_holds_the_first_stage(daemon, monkeypatch) -> None:
    run_toml()
    monkeypatch.setenv("LOCO_STAGE", "1")
    result = loco("start", "run.toml")
    assert result.exit_code == 2
    assert "stage = 1 (environment): the first peer of a run holds stage 0" in result.stderr
    assert not daemon.calls


@pytest.mark.parametrize("command", [["start", "run.toml"], ["join", "--bootstrap", "a:1"]])
def test_a_device_that_is_not_here_is_refused_before_the_daemon_runs(
    daemon, tmp_path: Path, command: list[str]
) -> None:
    run_toml()
    missing = f"cuda:{torch.cuda.device_count()}"
    result = loco(*command, "--device", missing)
    assert result.exit_code == 2
    assert f"device = {missing} (command line): device '{missing}' is not here" in result.stderr
    assert not daemon.calls
    assert loco(*command, "--device", "cpu").exit_code == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--gpus 5", "gpus = 5 (command line): there are 4 CUDA devices; use cuda:0 to cuda:3"),
        ("--gpus 1,4", "gpus = 1,4 (command line): there are 4 CUDA devices"),
        ("--gpus all --device cpu", "--device cpu has no GPUs to choose from; give a number of"),
        ("--gpus 2 --device cuda:1", "--device cuda:1 is one device; leave one of the two"),
    ],
)
def test_gpus_that_are_not_here_are_refused_before_the_daemon_runs(
    daemon, monkeypatch, options: str, sentence: str
) -> None:
    """On a machine that seems to have four: the tests run where there is none, too."""
    run_toml()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = loco("start", "run.toml", *options.split())
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not daemon.calls
    assert loco("start", "run.toml", "--gpus", "all").exit_code == 0


@pytest.mark.parametrize("option", ["--split-context", "--shard-weights"])
def test_what_one_gpu_cannot_do_is_refused_where_all_are_one(daemon, monkeypatch, option) -> None:
    run_toml()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count in (1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        result = loco("start", "run.toml", "--gpus", "all", option)
        assert result.exit_code == (2 if count == 1 else 0)
        assert (f"{option[2:]} = true (command line): needs several" in result.stderr) == (
            count == 1
        )


def test_one_gpu_of_several_is_not_said_to_be_all_that_there_are(daemon, monkeypatch) -> None:
    """A joiner's options are looked at before it knows the run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    result = loco("join", "--bootstrap", "a:1", "--gpus", "1", "--shard-weights")
    assert result.exit_code == 2
    assert "needs several GPUs, and gpus = 1 (command line) is one here" in result.stderr
    assert not daemon.calls


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sead = 1", "run.toml: unknown key 'sead'; did you mean 'seed'"),
        ("[model", "run.toml: not TOML"),
        ("#" * 300_000, "run.toml: longer than"),
    ],
)
def test_a_wrong_run_spec_is_told_and_is_2(daemon, text: str, sentence: str) -> None:
    result = loco("start", run_toml(text))
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_run_that_stages_cannot_train_is_refused_before_anything_starts(
    daemon, tmp_path: Path
) -> None:
    spec = '[pipeline]\nstages = 2\n[sync]\nmethod = "streaming"\n'
    result = loco("start", run_toml(spec))
    assert result.exit_code == 2
    assert "stages average by noloco so far" in result.stderr
    assert not daemon.calls
    assert not (tmp_path / "home").exists()


def test_a_file_of_tokens_that_is_not_there_is_told_before_anything_starts(daemon) -> None:
    result = loco("start", run_toml('[data]\nsource = "tokens:none.npy"\n'))
    assert (result.exit_code, "there is no file" in result.stderr) == (2, True)
    assert not daemon.calls


def test_a_run_spec_that_is_no_text_is_told(daemon) -> None:
    Path("run.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in loco("start", "run.toml").stderr


def test_unknown_variables_are_refused_by_every_command(daemon, monkeypatch) -> None:
    monkeypatch.setenv("LOCO_BOOSTRAP", "a:1")
    for command in (["start", run_toml()], ["join"], ["status"], ["leave"]):
        result = loco(*command)
        assert result.exit_code == 2
        assert "LOCO_BOOSTRAP; did you mean 'LOCO_BOOTSTRAP'" in result.stderr


def test_a_second_daemon_is_told_who_holds_the_home(daemon, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    with home.locked():
        result = loco("start", run_toml())
    assert result.exit_code == 2
    assert f"in use by the daemon with pid {os.getpid()}" in result.stderr


# --- commands that need a daemon ------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["leave"], ["export", "--hf", "x"]]
)
def test_no_daemon_is_4(command: list[str], tmp_path: Path) -> None:
    result = loco(*command)
    assert result.exit_code == 4
    assert f"no daemon is running in {tmp_path / 'home'}" in result.stderr


def test_a_daemon_that_is_still_starting_is_not_no_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says for how long its home has been held, so that one that hangs can be told."""
    monkeypatch.setattr(Home, "held_s", lambda _: 7.4)
    home = Home(tmp_path / "home")
    home.prepare()
    with home.locked():
        result = loco("status")
    assert result.exit_code == 1
    assert "takes no requests now: it is starting or ending" in result.stderr
    assert "(it has run for 7 s); try again in a few seconds" in result.stderr


async def test_leave_waits_for_a_daemon_that_takes_no_requests_yet(nursery, tmp_path: Path) -> None:
    """As one that joins again: its control socket is away, and its home is held all the same."""
    home, left, asked = Home(tmp_path / "home"), trio.Event(), trio.Event()
    home.prepare()

    async def leave(_: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        return {}

    async def leaves() -> None:
        await _leave(home)
        left.set()

    with home.locked():
        nursery.start_soon(leaves)
        await trio.testing.wait_all_tasks_blocked()
        await nursery.start(serve_control, home.control_socket, {"leave": leave}, print)
        await asked.wait()
        assert not left.is_set()
    await left.wait()


async def test_leave_is_content_with_a_daemon_that_ends_by_itself(nursery, tmp_path: Path) -> None:
    home, left = Home(tmp_path / "home"), trio.Event()
    home.prepare()

    async def leaves() -> None:
        await _leave(home)
        left.set()

    with home.locked():
        nursery.start_soon(leaves)
        await trio.testing.wait_all_tasks_blocked()
    await left.wait()


def test_no_command_shows_the_help() -> None:
    result = loco()
    assert result.exit_code == 2
    assert "\nA peer:\n  start " in result.output


# --- real processes -------------------------------------------------------------------------------

PROCESS = """
import contextlib, sys, types
import trio
from peer.options.exit_codes import ExitCode
from peer.observe.control import serve_control
from peer.observe.control import serve_control
from peer.facts import PeerState
from peer.observe.status import Status
from peer.process.signals import run_until_signalled

async def run_daemon(config, spec, home, spare):
    stop = trio.Event()

    async def status(arguments):
        return Status(peer_id="12D3KooWtest", state=PeerState.TRAINING, round=3).to_json()

    async def leave(arguments):
        stop.set()
        return {}

    async def job():
        async with trio.open_nursery() as nursery:
            handlers = {"status": status, "leave": leave}
            await nursery.start(serve_control, home.control_socket, handlers, print)
            print("ready", flush=True)
            await stop.wait()
            await trio.sleep(0.2)  # leaving takes a while, as it does for the real one
            nursery.cancel_scope.cancel()
        return ExitCode.OK

    return await run_until_signalled(job, stop, grace_s=config.grace_s)

module = types.ModuleType("peer.daemon.run")
module.run_daemon = run_daemon
sys.modules["peer.daemon.run"] = module
import peer.cli.run
peer.cli.run.spare_child = contextlib.nullcontext
from peer.cli import main
main()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, "join", "--bootstrap", "a:1"], stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        yield running
        running.kill()


@pytest.mark.slow
def test_status_and_leave_of_a_live_daemon(process, tmp_path: Path) -> None:
    tree = json.loads(loco("status", "--json").stdout)
    assert tree == Status(peer_id="12D3KooWtest", state=PeerState.TRAINING, round=3).to_json()
    assert "12D3KooWtest" in loco("status").stdout
    second = loco("join", "--bootstrap", "a:1")
    assert second.exit_code == 2
    assert f"pid {process.pid}" in second.stderr
    assert loco("leave").exit_code == 0
    assert not Home(tmp_path / "home").in_use()
    assert process.wait(timeout=20) == 0
    assert loco("status").exit_code == 4


@pytest.mark.slow
def test_after_kill_9_the_home_is_free_and_says_so(process, tmp_path: Path) -> None:
    process.kill()
    process.wait()
    assert loco("status").exit_code == 4
    assert not Home(tmp_path / "home").in_use()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_gracefully(process, number: int) -> None:
    process.send_signal(number)
    assert process.wait(timeout=20) == 0


JOINS_AGAIN = """
import contextlib, os, signal, sys, types
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from peer.cli import main
from peer.options.exit_codes import ExitCode
from peer.process.rejoin import JoinAgain
from peer.state.home import Home
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

async def run_daemon(config, spec, home, spare):
    if not again:
        key = Ed25519PrivateKey.generate()
        public = key.public_key().public_bytes_raw()
        home.bind_run(SignedSpec.signed_by(RunSpec(), public, key.sign))
        raise JoinAgain("far behind")
    return ExitCode.OK

home = Home(Path(os.environ["LOCO_HOME"]))
again = home.in_use()
if again:
    print(home.holder()["pid"] == os.getpid(), sys.argv[-2:], flush=True)
    TEST
module = types.ModuleType("peer.daemon.run")
module.run_daemon = run_daemon
sys.modules["peer.daemon.run"] = module
import peer.cli.run
peer.cli.run.spare_child = contextlib.nullcontext
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meanwhile", "code"),
    [
        ("pass", ExitCode.OK),
        ("os.kill(os.getpid(), signal.SIGTERM)", ExitCode.TERMINATED),
    ],
)
def test_who_joins_again_in_a_new_process_holds_its_home_and_heeds_signals_meanwhile(
    tmp_path: Path, meanwhile: str, code: ExitCode
) -> None:
    script = tmp_path / "loco.py"
    script.write_text(JOINS_AGAIN.replace("TEST", meanwhile))
    ran = subprocess.run(
        [sys.executable, str(script), "join", "--bootstrap", "a:1"],
        capture_output=True,
        text=True,
        check=False,
    )
    again = "True ['--bootstrap', 'a:1']\n"
    assert (ran.stdout, ran.returncode) == (again, code), ran.stderr
    assert "far behind; joining again in a new process" in ran.stderr
    assert not Home(tmp_path / "home").in_use()


HEAVY = ("torch", "hivemind", "transformers", "numpy", "trio", "rich", "cryptography", "blake3")


def test_a_port_that_is_taken_is_wrong_usage() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(CannotListen, match=f"port {port} is taken.*--listen") as taken,
            held_ports([f"/ip4/127.0.0.1/tcp/{port}"]),
        ):
            pass
    assert exit_code_of(taken.value) is ExitCode.USAGE


WATCHED = """
import sys
from peer.cli import main

class Watched:
    loaded = None

    def write(self, text):
        if self.loaded is None:
            self.loaded = [name for name in HEAVY if name in sys.modules]
            print(text)

    def flush(self):
        pass

sys.stderr = Watched()
try:
    main()
finally:
    print(sys.stderr.loaded)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [["start", "no.toml"], ["join", "--bootstrap", "a:1"]])
def test_the_first_line_waits_for_nothing_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (tmp_path / "home").touch()  # a home that cannot be used: it ends soon
    script = WATCHED.replace("HEAVY", repr(HEAVY))
    ran = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.returncode) == (first_line(tmp_path) + "[]\n", ExitCode.USAGE)
