"""What commands do not wait for: torch takes seconds to import, and a minute on a busy machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from existing import existing
from test_flags import FROZEN

from peer.facts import PeerState
from peer.observe.control import serve_control
from peer.observe.status import Status
from peer.options.exit_codes import ExitCode
from peer.state.home import Home
from protocol.address.peer_id import peer_id_from_public_key

HEAVY = ("torch", "transformers", "pandas", "matplotlib", "textual", "hivemind", "datasets")
HELP_WAITS_FOR_NO = (*HEAVY, "numpy", "trio", "rich", "cryptography", "blake3")
TRAIN = {"start", "join", "measure"}
MAKE_MODELS = {"eval", "export", "extend", "generate"}
LOOKS_FOR_GPUS = {"doctor"}
IMPORTS_TORCH = TRAIN | MAKE_MODELS | LOOKS_FOR_GPUS
"""Commands that need torch for what they do: `LIGHT` below does all that the others do."""
IMPORTS_TEXTUAL = {"top"}

FORKING = f"""
import importlib, json, os, sys, traceback

for name in sys.argv[1:]:
    importlib.import_module(name)
from peer.cli import main

for line in sys.stdin:
    arguments, home, said = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

os.chdir(os.path.dirname(home))
os.environ["LOCO_HOME"] = home
sys.argv = ["loco-peer", *arguments]
for fd, path in enumerate([os.devnull, said + ".out", said + ".err"]):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), fd)
sys.stdin = open(0)
code = 1
try:
    main()
except SystemExit as exit:
    code = exit.code or 0
except BaseException:
    traceback.print_exc()
loaded = [name for name in {HELP_WAITS_FOR_NO} if name in sys.modules]
print("LOADED", loaded, file=sys.__stderr__, flush=True)
sys.stdout.flush()
os._exit(code)  # to take down what was loaded takes five times as long as a command
"""
"""Loads modules once, and then runs each command in a fork: what was loaded counts for each."""

PEER = peer_id_from_public_key(bytes(32))
PEERS = "peer,location,compute_s,slots,price_per_hour\na,Iowa,0.1,1,1\nb,Iowa,0.2,1,1\n"
FILES = {
    "run.toml": "seed = 5\n",
    "wrong.toml": "sead = 5\n",
    "list.toml": '[admission]\nmode = "list"\n',
    "peers.csv": PEERS,
    "no-export/mine": "",
}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Home(tmp_path / "home")


Loaded = Callable[..., tuple[int, str, set[str]]]


@contextmanager
def forking(*imports: str) -> Iterator[Loaded]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCO_")}
    command = [sys.executable, "-c", FORKING, *imports]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as forks:
        orders, ends = existing(forks.stdin), existing(forks.stdout)

        def loaded_by(home: Home, *arguments: str) -> tuple[int, str, set[str]]:
            """Exit code, what was said, and what was loaded, of a command in a new process."""
            said = home.root.parent / "said"
            print(json.dumps([arguments, str(home.root), str(said)]), file=orders, flush=True)
            code = int(ends.readline())
            error, _, loaded = said.with_suffix(".err").read_text().rpartition("LOADED ")
            return code, said.with_suffix(".out").read_text() + error, set(eval(loaded))

        yield loaded_by
        orders.close()


@pytest.fixture(scope="module")
def bare() -> Iterator[Loaded]:
    with forking("peer.cli.app") as loaded_by:
        yield loaded_by


@pytest.fixture(scope="module")
def loaded_by() -> Iterator[Loaded]:
    """Modules that most commands load, and no heavy one."""
    with forking("peer.cli.app", "peer.cli.run", "peer.training.corpus") as loaded_by:
        yield loaded_by


@pytest.mark.slow
@pytest.mark.parametrize("command", ["", *FROZEN])
def test_help_waits_for_nothing_heavy(home: Home, bare: Loaded, command: str) -> None:
    code, said, loaded = bare(home, *command.split(), "--help")
    assert (code, loaded) == (0, set())
    assert said.startswith("Usage: ")


USAGE: list[tuple[str, int, str]] = [
    ("", 2, "Usage: "),
    ("--wrong", 2, "No such option: --wrong"),
    ("nonsense", 2, "No such command 'nonsense'"),
    ("start --wrong", 2, "No such option: --wrong"),
    ("start", 2, "has no run to continue"),
    ("start missing.toml", 2, "missing.toml does not exist"),
    ("start wrong.toml", 2, "unknown key 'sead'"),
    ("start run.toml --device tpu", 2, "--device: use 'cpu'"),
    ("start run.toml --listen x", 2, "--listen"),
    ("start run.toml --export-when-done no-export", 2, "not empty and not an export"),
    ("join", 2, "join needs the address of a peer"),
    ("join --bootstrap x", 2, "--bootstrap: give a host and the port"),
    ("join --bootstrap a:1 --threads many", 2, "--threads: use a whole number"),
    ("new", 2, "Missing argument 'RUN.toml'"),
    ("new run.toml", 2, "run.toml exists already"),
    ("new x.toml --preset huge", 2, "unknown preset 'huge'"),
    ("new x.toml --stages 9", 2, "'demo' has 4 layers"),
    ("new x.toml --data books/*.txt", 2, "for text files write text:books/*.txt"),
    ("completion csh", 2, "no completion for 'csh': use bash or zsh or fish"),
    ("status", 4, "no daemon is running"),
    ("status --health", 1, "no daemon is running"),
    ("top", 2, "top needs a terminal"),
    ("leave", 4, "no daemon is running"),
    ("pause", 4, "no daemon is running"),
    ("resume", 4, "no daemon is running"),
    ("invite", 4, "no daemon is running"),
    ("invite --expires never", 2, "--expires: use a whole number"),
    ("ban nobody!", 2, "is not a peer id"),
    ("admit abcdefgh", 4, "no daemon is running"),
    ("delegate abcdefgh", 4, "no daemon is running"),
    ("amend", 2, "name the run spec with your changes"),
    ("amend missing.toml", 2, "cannot read missing.toml"),
    ("amend wrong.toml", 2, "unknown key 'sead'"),
    ("amend list.toml", 4, "no daemon is running"),
    ("export", 2, "Missing option '--hf'"),
    ("export --hf hf", 4, "the home has no checkpoint either"),
    ("export --hf hf --swarm", 4, "no daemon is running"),
    ("export --hf no-export", 2, "--hf: no-export is not empty and not an export"),
    ("eval", 2, "belongs to no run yet"),
    ("eval --hf no-export", 2, "--hf: for --tasks alone"),
    ("eval --tasks , --hf no-export", 2, "--tasks: name tasks of lm-eval"),
    ("eval --tasks x --check", 2, "--check is for the experts of a run"),
    ("eval --tasks x --device tpu", 2, "--device: use 'cpu'"),
    ("extend next.toml --data text:x --steps 9", 4, "the home has no checkpoint either"),
    ("extend . --data text:x --steps 9", 2, "RUN.toml: . names no file"),
    ("extend / --data text:x --steps 9", 2, "RUN.toml: / names no file"),
    (f"new {'x' * 300}.toml", 2, "File name too long"),
    ("extend no-export.toml --data text:x --steps 9", 2, "no-export is not empty and not an exp"),
    ("generate --prompt x", 2, "belongs to no run yet"),
    ("generate --prompt x --hf missing", 2, "missing is not an export"),
    ("generate --prompt x --hf missing --home .", 2, "name two models"),
    ("generate --prompt x --hf missing --without-stages one", 2, "takes numbers such as 2,3"),
    ("plan missing.toml --peers peers.csv", 2, "missing.toml does not exist"),
    ("plan run.toml --peers missing.csv", 2, "cannot read missing.csv"),
    ("plan run.toml --peers wrong.toml", 2, "wrong.toml"),
    ("measure missing.toml", 2, "missing.toml does not exist"),
    ("measure wrong.toml", 2, "unknown key 'sead'"),
    ("measure --device tpu", 2, "--device: use 'cpu'"),
    ("measure --threads 0", 2, "--threads: must be from 1"),
    ("measure --seconds long", 2, "--seconds"),
    ("doctor --listen x", 2, "--listen"),
    ("doctor --bootstrap x", 2, "--bootstrap"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "code", "sentence"), USAGE, ids=[line for line, *_ in USAGE])
def test_wrong_usage_is_told_without_anything_heavy(home, loaded_by, line, code, sentence) -> None:
    found, said, loaded = loaded_by(home, *line.split())
    assert (found, loaded & set(HEAVY)) == (code, set())
    assert sentence in said
    assert "Traceback" not in said


def test_each_command_is_used_wrongly_in_the_table() -> None:
    assert {line.split()[0] for line, *_ in USAGE if line} >= set(FROZEN) - {"version"}


LIGHT = {
    "version": "0.",
    "completion bash": "complete -o default",
    "new new.toml --stages 2": "wrote new.toml",
    "plan run.toml --peers peers.csv": "tokens/s",
    "status": "12D3KooWtest",
    "status --json": "12D3KooWtest",
    "status --health": "",
    "pause": "pausing",
    "resume": "training resumed",
    "invite": "LOCO_INVITE=a-token",
    f"ban {PEER}": "banned",
    f"admit {PEER}": "admitted",
    f"delegate {PEER}": "delegated",
    "amend list.toml --dry-run": "would change at once",
    "amend --show": "nothing has been amended",
    "leave": "",
}
"""Calls that do what their command is for."""


@pytest.mark.slow
async def test_what_needs_no_torch_does_its_work_without_it(
    home: Home, loaded_by: Loaded, nursery: Any
) -> None:
    home.prepare()
    left = trio.Event()
    status = Status(peer_id="12D3KooWtest", state=PeerState.TRAINING, round=3).to_json()
    answers: dict[str, dict[str, Any]] = {
        "status": status,
        "pause": {},
        "resume": {},
        "invite": {"token": "a-token", "address": "192.0.2.2:31337", "note": ""},
        "rule": {"peer": PEER},
        "amend": {"changes": [["admission.mode", "open", "list"]], "admitted": []},
        "leave": {"grace_s": 1.0},
    }

    def answering(name: str) -> Any:
        async def answer(_: dict[str, Any]) -> dict[str, Any]:
            if name == "leave":
                left.set()
            return answers[name]

        return answer

    async def daemon(task_status: trio.TaskStatus[None]) -> None:
        """It holds the home until it is told to leave."""
        with home.locked():
            async with trio.open_nursery() as inner:
                handlers = {name: answering(name) for name in answers}
                await inner.start(serve_control, home.control_socket, handlers, print)
                task_status.started()
                await left.wait()
                inner.cancel_scope.cancel()

    await nursery.start(daemon)
    for line, sentence in LIGHT.items():
        code, said, loaded = await trio.to_thread.run_sync(loaded_by, home, *line.split())
        assert (line, loaded & set(HEAVY)) == (line, set())
        assert sentence in said
        assert code == ExitCode.OK or line == "status --health", said
    commands = {line.split()[0] for line in LIGHT}
    assert commands == set(FROZEN) - IMPORTS_TORCH - IMPORTS_TEXTUAL
