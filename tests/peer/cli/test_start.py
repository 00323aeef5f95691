"""`start` in a home: what it founds with, what it goes on with, and what it puts away."""

import json
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from errno import EAFNOSUPPORT, ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from tokenizers import Tokenizer, models

from peer.cli import run as run_file
from peer.cli.options import Start, read_spec
from peer.cli.run import run_peer
from peer.daemon.entry import found, join
from peer.daemon.returning import come_back
from peer.daemon.run import _Daemon
from peer.facts import Facts
from peer.network.identity import Identity, load, load_or_create
from peer.options.config import ConfigError, PeerConfig, load_config
from peer.options.exit_codes import ExitCode
from peer.options.needs_told import NotAgreed
from peer.options.values import TRACKERS
from peer.runtime.files import replace_file
from peer.state import home as home_file
from peer.state.checkpoints import CheckpointStore
from peer.state.home import Home, HomeError, OtherRun
from protocol.errors import InvalidRunSpec
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

GB = 10**9
SPEC = """
name = "{name}"
[data]
source = "stdlib"
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="loco-test-") as path:  # short, for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Home(Path(path) / "home")


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of daemons: what each of them would come to its run by, after the real choice."""
    entries: list[str] = []

    async def live(config: PeerConfig, spec: RunSpec | None, home: Home) -> ExitCode:
        await trio.lowlevel.checkpoint()
        identity = load_or_create(home.identity_path)
        daemon = daemon_of(config, home)
        founder = daemon._keys(identity, spec).founder
        kind: Any = daemon._entry(spec)
        entry = KINDS[kind.func]
        entries.append(entry)
        if entry == "founding":
            assert spec is not None
            assert founder is not None
            home.bind_run(SignedSpec.signed_by(spec, founder.public_key, founder.sign))
            keep_a_checkpoint(home)
        return ExitCode.OK

    monkeypatch.setattr(run_file, "_run_daemon", live)
    return entries


KINDS: Any = {found: "founding", come_back: "returning", join: "joining"}


def config_of(home: Home) -> PeerConfig:
    return load_config({"home": home.root}, {})


def daemon_of(config: PeerConfig, home: Home) -> _Daemon:
    spare: Any = None
    return _Daemon(config, home, spare, trio.Event(), lambda _: False)


def keep_a_checkpoint(home: Home) -> None:
    folder = home.checkpoints_dir / "000001-step-50"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "outer.safetensors").write_bytes(b"weights")


def toml_of(folder: Path, name: str) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(SPEC.format(name=name))
    return path


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("lock", "identity.key")
    }


def start(home: Home, run_toml: Path | None, *, new_run: bool = False) -> ExitCode:
    return run_peer(config_of(home), Start(run_toml, new_run))


def test_a_home_with_a_run_goes_on_with_it_and_founds_none_anew(
    home: Home, lives: list[str], tmp_path: Path
) -> None:
    run_toml = toml_of(tmp_path, "first")
    start(home, run_toml)
    before = files_in(home.root)
    for again in (run_toml, None):
        assert start(home, again) is ExitCode.OK
    with pytest.raises(OtherRun, match="differs in name.*--new-run"):
        start(home, toml_of(tmp_path, "second"))
    assert lives == ["founding", "returning", "returning"]
    assert files_in(home.root) == before
    assert not home.old_runs_dir.exists()


@pytest.mark.parametrize("second", ["first", "second"])
def test_new_run_puts_the_old_one_away_whole_and_founds_another(
    home: Home, lives: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], second: str
) -> None:
    start(home, toml_of(tmp_path, "first"))
    old_run, old_files = home.run(), files_in(home.root)
    assert old_run is not None
    home.neighbours_path.write_text("{}")
    start(home, toml_of(tmp_path, second), new_run=True)
    new_run = home.run()
    assert lives == ["founding", "founding"]
    assert new_run is not None
    assert new_run.run_id != old_run.run_id, "of the same spec it is another run too"
    old = home.old_runs_dir / old_run.run_id
    assert files_in(old) == {**old_files, "neighbours.json": b"{}"}
    assert f"the home's old run was moved to {old}" in capsys.readouterr().err


def test_curves_for_a_library_that_is_not_here_are_refused_before_anything_else(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # that it leaves where it has run
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in TRACKERS:
        config = load_config({"home": home.root, "track": [name]}, {})
        said = f"track = {name} (command line): {name} is not installed here; install it with: pip"
        with pytest.raises(ConfigError, match=re.escape(f"{said} install 'loco-peer[{name}]'")):
            run_peer(config, Start(toml_of(tmp_path, "run"), new_run=False))
        assert name not in sys.modules
    assert not home.root.exists()
    with pytest.raises(ConfigError, match="use 'trackio' or 'wandb' or 'tensorboard'"):
        load_config({"home": home.root, "track": ["mlflow"]}, {})


def test_a_run_that_was_put_away_twice_is_kept_twice(home: Home, tmp_path: Path) -> None:
    """A home that has joined the same run again."""
    home.prepare()
    founder = Identity(b"f" * 32)
    signed = SignedSpec.signed_by(
        read_spec(toml_of(tmp_path, "run")), founder.public_key, founder.sign
    )
    places = []
    for _ in range(3):
        home.bind_run(signed)
        keep_a_checkpoint(home)
        places.append(home.put_run_away())
    assert len(set(places)) == 3
    kept = [files_in(place) for place in places if place is not None]
    assert kept[0] == kept[1] == kept[2]
    assert kept[0].keys() >= {"run.json", "checkpoints/000001-step-50/manifest.json"}


def test_the_founders_key_is_a_file_of_its_own_that_only_its_owner_reads(home: Home) -> None:
    home.prepare()
    daemon, identity = daemon_of(config_of(home), home), Identity(b"i" * 32)
    assert daemon._keys(identity, None).founder is None
    assert not home.founder_key_path.exists(), "who joins has none"
    founder = daemon._keys(identity, RunSpec()).founder
    assert founder is not None
    assert home.founder_key_path == home.root / "founder.key"
    assert stat.S_IMODE(home.founder_key_path.stat().st_mode) == 0o600
    assert founder.peer_id != identity.peer_id
    assert load(home.founder_key_path).peer_id == founder.peer_id
    for spec in (RunSpec(), None):  # it is that key in every later life
        again = daemon._keys(identity, spec).founder
        assert again is not None
        assert again.peer_id == founder.peer_id


def test_only_a_home_that_is_new_to_its_run_is_told_what_it_takes(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.prepare()
    parts: Any = SimpleNamespace(events=None, facts=Facts("me", 1))
    daemon, spec = daemon_of(config_of(home), home), RunSpec()
    on_run = daemon._settings(parts, founds=False).on_run
    assert on_run is not None
    on_run(spec, 10**9)
    assert "1.0B tokens: one peer reads" in capsys.readouterr().err
    founder = Identity(b"f" * 32)
    home.bind_run(SignedSpec.signed_by(spec, founder.public_key, founder.sign))
    assert daemon._settings(parts, founds=False).on_run is None


@pytest.mark.parametrize(
    ("terminal", "answer", "asked"), [(False, "", 0), (True, "n", 1), (True, "", 1), (True, "y", 1)]
)
def test_a_run_that_takes_much_is_asked_for_where_there_is_somebody_to_ask(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    answer: str,
    asked: int,
) -> None:
    agreed = []

    async def join_large(config: PeerConfig, *_: object) -> ExitCode:
        await trio.lowlevel.checkpoint()
        agreed.append(config.yes)
        if not config.yes:
            raise ExceptionGroup("of the nursery", [NotAgreed("it takes 9 of 10 GB")])
        return ExitCode.OK

    keyboard = SimpleNamespace(isatty=lambda: terminal, readline=lambda: f"{answer}\n")
    monkeypatch.setattr(run_file, "_run_daemon", join_large)
    monkeypatch.setattr(sys, "stdin", keyboard)
    config = load_config({"home": home.root, "bootstrap": ["h:1"]}, {})
    if answer == "y":
        assert run_peer(config, None) is ExitCode.OK
        assert agreed == [False, True]
    else:
        with pytest.raises(NotAgreed, match="9 of 10"):
            run_peer(config, None)
        assert agreed == [False]
    assert capsys.readouterr().err.count("join nevertheless?") == asked


def test_only_a_joiner_whose_home_is_new_is_told_and_asked_before_anything_is_fetched(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home.prepare()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100 << 20))
    parts: Any = SimpleNamespace(events=None, facts=Facts("me", 1))
    tree = {"data": {"manifest": "0" * 32, "tokenizer_digest": "bytes"}}
    spec = RunSpec.model_validate(tree)  # takes 150 MB, of them 67 for whatever run

    def check(*, founds: bool) -> None:
        daemon_of(config_of(home), home)._settings(parts, founds=founds).check_spec(spec, None)

    check(founds=True)
    assert capsys.readouterr().err == "", "its command has said it"
    with pytest.raises(NotAgreed, match=r"of disk \(105 MB are free\)"):
        check(founds=False)
    said = capsys.readouterr().err
    assert [word for word in ("model", "memory", "disk", "line") if f"  {word} " in said] == [
        "model",
        "memory",
        "disk",
        "line",
    ]
    founder = Identity(b"f" * 32)
    home.bind_run(SignedSpec.signed_by(spec, founder.public_key, founder.sign))
    check(founds=False)
    assert capsys.readouterr().err == "", "it has agreed once"


def test_pieces_of_the_corpus_take_a_quarter_of_what_is_free_unless_more_is_allowed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is here already counts as free: a peer that comes back drops none of it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=60 * GB))
    parts: Any = SimpleNamespace(events=None, facts=Facts("me", 1))

    def most(config: PeerConfig) -> Any:
        return daemon_of(config, home)._settings(parts, founds=False).most_corpus_bytes

    assert [most(config_of(home))(held) for held in (0, 20 * GB)] == [15 * GB, 20 * GB]
    allowed = load_config({"home": home.root, "max-corpus-gb": "50"}, {})
    assert most(allowed)(0) == 50 * GB


PAGE = "http://127.0.0.1:1/"
WATCHED = SimpleNamespace(metrics_url=f"{PAGE}metrics", status=lambda: SimpleNamespace(page=PAGE))


def announced(
    home: Home, capsys: pytest.CaptureFixture[str], admission: SimpleNamespace, *, founds: bool
) -> str:
    """What a peer of a run with this admission prints for those that would join."""
    network = SimpleNamespace(addresses=("/ip4/192.0.2.1/tcp/1/p2p/x",))
    parts: Any = SimpleNamespace(
        network=network, admission=admission, facts=Facts("x", 1), report=WATCHED
    )
    daemon_of(config_of(home), home)._announce(parts, founds=founds)
    return capsys.readouterr().out


def test_the_join_line_says_from_where_it_can_be_used(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the best of the addresses: here others got through at the second."""
    here = [f"/ip4/{host}/tcp/1/p2p/x" for host in ("10.8.0.2", "192.168.1.5", "127.0.0.1")]
    facts = Facts("x", 1)
    facts.reach.working = ("/ip4/192.168.1.5/tcp/1",)
    parts: Any = SimpleNamespace(
        network=SimpleNamespace(addresses=here),
        admission=SimpleNamespace(wants_invitations=False),
        facts=facts,
        report=WATCHED,
    )
    daemon_of(config_of(home), home)._announce(parts, founds=False)
    _, command, note, watch = capsys.readouterr().out.splitlines()
    assert watch.startswith(f"watch it: {PAGE} ")
    assert command == f"  loco-peer join --bootstrap {here[1]}"
    assert note.startswith("  (only reachable from this network; from elsewhere:")
    as_json = replace(config_of(home), json_ready=True)
    daemon_of(as_json, home)._announce(parts, founds=False)
    ready = json.loads(capsys.readouterr().out)
    assert ready["join"] == command.strip()
    assert ready["addresses"] == [here[1], here[0], here[2]]
    assert ready["reachable_from"] == "this network"


@pytest.mark.parametrize("may_sign", [True, False])
def test_where_others_need_an_invitation_it_says_where_one_is_made(
    home: Home, capsys: pytest.CaptureFixture[str], may_sign: bool
) -> None:
    admission = SimpleNamespace(wants_invitations=True, may_sign=may_sign)
    said = announced(home, capsys, admission, founds=False)
    assert (f"loco-peer invite --home {home.root}" in said) == may_sign
    assert ("where the run was started, or at a delegate's" in said) != may_sign
    assert "only reachable" not in said, "no address is shown"


@pytest.mark.parametrize("founds", [True, False])
def test_start_tells_to_keep_a_copy_of_it(
    home: Home, capsys: pytest.CaptureFixture[str], founds: bool
) -> None:
    said = announced(home, capsys, SimpleNamespace(wants_invitations=False), founds=founds)
    assert "loco-peer join --bootstrap /ip4/192.0.2.1/tcp/1/p2p/x" in said
    assert (f"keep a copy of {home.founder_key_path}" in said) == founds


def test_a_restore_takes_no_run_spec_and_one_that_is_not_needed_goes_on_with_the_home(
    home: Home,
    lives: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a container may be started again with the same command."""
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(SPEC.format(name="one"))
    with pytest.raises(ConfigError, match="give it no run spec"):
        run_peer(config_of(home), Start(run_toml, new_run=False, restore="there"))
    run_peer(config_of(home), Start(run_toml, new_run=False))
    there = str(tmp_path / "there")
    monkeypatch.setattr(CheckpointStore, "newest_whole", lambda *_: "the kept checkpoint")
    run_peer(config_of(home), Start(None, new_run=False, restore=there))
    assert "  not needed: this home has the run" in capsys.readouterr().err
    assert lives == ["founding", "returning"]


def test_the_room_on_the_disk_is_looked_at_before_a_run_is_entered(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So before a founder makes its corpus."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(HomeError, match="1 MB are free. Free some space"):
        daemon_of(config_of(home), home)._check_spec(RunSpec(), None, joins=False)


# --- from a checkpoint ----------------------------------------------------------------------------
@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What is read of a checkpoint before anything starts."""
    folder = tmp_path / "hf"
    folder.mkdir()
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 2}')
    return folder


def toml_from(folder: Path, checkpoint: Path, tokenizer: str | None = None) -> Path:
    named = "" if tokenizer is None else f'tokenizer = "{tokenizer}"\n'
    path = folder / "tuned.toml"
    path.write_text(f'[model]\ninit_from = "{checkpoint}"\n[data]\n{named}source = "stdlib"\n')
    return path


def founded_tokenizer(home: Home) -> str:
    signed = home.run()
    assert signed is not None
    return signed.spec().data.tokenizer


def test_a_run_from_a_checkpoint_has_its_tokenizer_and_comes_back(
    home: Home,
    lives: list[str],
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_toml = toml_from(tmp_path, checkpoint)
    start(home, run_toml)
    assert founded_tokenizer(home) == str(checkpoint)
    assert "2e-05 with warmup_steps = 100 is usual" in capsys.readouterr().err
    (checkpoint / "config.json").unlink()  # who comes back needs it no more
    start(home, run_toml)
    assert lives == ["founding", "returning"]


def test_a_run_from_a_checkpoint_has_its_family_and_comes_back(
    home: Home, lives: list[str], tmp_path: Path, checkpoint: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "mixtral"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    run_toml = toml_from(tmp_path, checkpoint)
    for _ in range(2):
        start(home, run_toml)
    signed = home.run()
    assert signed is not None
    assert signed.spec().model.family == "mixtral"
    assert lives == ["founding", "returning"]


def test_a_named_tokenizer_of_another_model_is_refused_before_the_home_is_touched(
    home: Home, lives: list[str], tmp_path: Path, checkpoint: Path
) -> None:
    with pytest.raises(InvalidRunSpec, match="is not the tokenizer of"):
        start(home, toml_from(tmp_path, checkpoint, "bytes"))
    assert lives == []
    assert not home.root.exists()


def test_a_run_that_was_founded_with_bytes_for_want_of_a_name_keeps_them(
    home: Home, lives: list[str], tmp_path: Path, checkpoint: Path
) -> None:
    """As loco-peer did before tokenizers followed checkpoints."""
    home.prepare()
    run_toml, founder = toml_from(tmp_path, checkpoint), Identity(b"f" * 32)
    home.bind_run(SignedSpec.signed_by(read_spec(run_toml), founder.public_key, founder.sign))
    keep_a_checkpoint(home)
    start(home, run_toml)
    assert founded_tokenizer(home) == "bytes"
    assert lives == ["returning"]


# --- wrong usage ----------------------------------------------------------------------------------
@pytest.mark.parametrize("option", ["listen", "metrics"])
def test_a_port_that_is_taken_is_wrong_usage(
    home: Home, lives: list[str], tmp_path: Path, option: str
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        where = f"127.0.0.1:{other.getsockname()[1]}"
        config = load_config({"home": home.root, option: where}, {})
        with pytest.raises(ConfigError, match=f"port .* is taken; choose another with --{option}"):
            run_peer(config, Start(toml_of(tmp_path, "run"), new_run=False))
    run_peer(config, Start(toml_of(tmp_path, "run"), new_run=False))
    assert lives == ["founding"]


def test_without_ipv6_its_addresses_are_left_to_who_listens(
    home: Home, lives: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *more: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *more)

    config = load_config({"home": home.root, "listen": "[::1]:31337"}, {})
    monkeypatch.setattr("peer.cli.run.socket.socket", without_ipv6)
    run_peer(config, Start(toml_of(tmp_path, "run"), new_run=False))
    assert lives == ["founding"]


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "tokens"])
def test_data_that_is_not_there_is_told_before_anything_is_made(
    home: Home, lives: list[str], tmp_path: Path, source: str
) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(f'[data]\nsource = "{source}:{tmp_path}/nothing"\n')
    with pytest.raises(ConfigError, match=r"^data\.source: .*no file"):
        start(home, run_toml)
    run_toml.write_text(f'[data]\nsource = "stdlib"\nreplay = "{source}:{tmp_path}/nothing"\n')
    with pytest.raises(ConfigError, match=r"^data\.replay: .*no file"):
        start(home, run_toml)
    assert not home.root.exists()


@pytest.mark.parametrize("kind", ["text:", "tokens:", ""])
def test_own_data_that_is_not_there_is_told_by_its_option_before_anything_is_made(
    home: Home, lives: list[str], tmp_path: Path, kind: str
) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text('[data]\nsource = "stdlib"\n')
    config = load_config({"home": home.root, "data": f"{kind}{tmp_path}/nothing"}, {})
    with pytest.raises(ConfigError, match=r"^data = .*nothing \(.*\): .*no file"):
        run_peer(config, Start(run_toml, new_run=False))
    assert not home.root.exists()


@pytest.mark.parametrize("kind", ["tokens:", ""])
def test_a_founders_own_file_of_tokens_does_not_drop_what_is_replayed(
    home: Home, lives: list[str], tmp_path: Path, kind: str
) -> None:
    """To a peer that comes later such a file is the corpus, in which the old texts are already."""
    (tmp_path / "tokens.bin").touch()
    run_toml = tmp_path / "run.toml"
    run_toml.write_text('[data]\nsource = "text:nowhere"\nreplay = "stdlib"\n')
    config = load_config({"home": home.root, "data": f"{kind}{tmp_path}/tokens.bin"}, {})
    with pytest.raises(ConfigError, match=r"^data = .*without data\.replay; name it in data\.s"):
        run_peer(config, Start(run_toml, new_run=False))
    assert not home.root.exists()
    run_peer(replace(config, data="stdlib"), Start(run_toml, new_run=False))
    assert lives == ["founding"]


def test_of_one_text_it_says_how_much_is_held_out(
    home: Home, lives: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("ten bytes\n" * 100)
    run_toml = tmp_path / "run.toml"
    data = f'source = "text:{tmp_path}/*.txt"\nvalidation_blocks = 1\n'
    run_toml.write_text(f"[data]\n{data}")
    start(home, run_toml)
    assert "its last 5%, 40 of 1,000 bytes, is held out" in capsys.readouterr().err


def test_a_folder_for_the_model_that_holds_something_else_is_wrong_usage(
    home: Home, lives: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    config = load_config({"home": home.root, "export-when-done": str(tmp_path / "mine")}, {})
    with pytest.raises(ConfigError, match="export-when-done .*not empty and not an export"):
        run_peer(config, Start(toml_of(tmp_path, "run"), new_run=False))
    assert not home.root.exists()


def test_who_follows_and_agrees_goes_on_to_follow(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[object] = []

    async def join_large(config: PeerConfig, _: RunSpec | None, home: Home) -> ExitCode:
        await trio.lowlevel.checkpoint()
        followed.append(home.followed())
        home.successor_path.unlink()
        if not config.yes:
            raise ExceptionGroup("of the nursery", [NotAgreed("it takes 9 of 10 GB")])
        return ExitCode.OK

    monkeypatch.setattr(run_file, "_run_daemon", join_large)
    monkeypatch.setattr(run_file, "_ask", lambda _: None)
    home.prepare()
    home.follow("cd" * 16, "/ip4/192.0.2.2/tcp/1/p2p/x")
    given = {"home": home.root, "bootstrap": ["h:1"], "follow": True}
    assert run_peer(load_config(given, {}), None) is ExitCode.OK
    assert followed == [("cd" * 16, "/ip4/192.0.2.2/tcp/1/p2p/x")] * 2


# --- a run that follows ---------------------------------------------------------------------------


def signed_of(tmp_path: Path, name: str, more: str = "") -> SignedSpec:
    founder = Identity(name[:1].encode() * 32)
    path = toml_of(tmp_path, name)
    path.write_text(path.read_text() + more)
    spec = read_spec(path)
    return SignedSpec.signed_by(spec, founder.public_key, founder.sign)


def test_a_home_follows_once_and_comes_back_to_where_it_went(home: Home, tmp_path: Path) -> None:
    """Whatever its command line says, which was written for the first run."""
    home.prepare()
    first, second = signed_of(tmp_path, "first"), signed_of(tmp_path, "second")
    home.bind_run(first)
    keep_a_checkpoint(home)
    home.follow(second.run_id, "/ip4/192.0.2.2/tcp/1/p2p/x")
    given = {"home": home.root, "bootstrap": ["192.0.2.1:1"], "data": "text:old.txt"}
    plain = run_file._as_followed(load_config(given, {}), home)
    assert (plain.bootstrap, plain.data) == (("192.0.2.1:1",), "text:old.txt")
    assert daemon_of(plain, home)._following() is None, "its user has not let it"
    config = run_file._as_followed(load_config(given | {"follow": True}, {}), home)
    assert (config.bootstrap, config.data) == (("/ip4/192.0.2.2/tcp/1/p2p/x",), None)

    entry: Any = daemon_of(config, home)._entry(None)
    following = entry.keywords["following"]
    assert (entry.func, entry.args[0]) == (join, config.bootstrap)
    assert following.run_id == second.run_id
    again: Any = daemon_of(config, home)._entry(None)
    assert (again.func, again.args[0]) == (come_back, first), "it was not there: back, and anew"

    names = '[[experts]]\nname = "all"\n[[experts]]\nname = "code"\nsource = "text:code/*"\n'
    with pytest.raises(InvalidRunSpec, match="experts: join it in another --home"):
        following.move(signed_of(tmp_path, "third", names))
    assert home.run() == first

    following.move(second)
    assert home.run() == second
    assert (home.old_runs_dir / first.run_id / "checkpoints/000001-step-50").is_dir()
    config = run_file._as_followed(load_config(given | {"follow": True}, {}), home)
    entry = daemon_of(config, home)._entry(None)
    assert (entry.func, entry.args[:2]) == (come_back, (second, config.bootstrap))
    named: Any = SimpleNamespace(run_id=first.run_id)
    assert not daemon_of(config, home)._follows(named), "two that name each other"
    named.run_id = "ef" * 16
    assert daemon_of(config, home)._follows(named)
    assert not daemon_of(plain, home)._follows(named)
    home.founder_key_path.touch()
    assert not daemon_of(config, home)._follows(named), "a founder stays, and tells the others"

    home.put_run_away()  # --new-run
    assert home.followed() is None


@pytest.mark.parametrize("writes", range(4))
def test_a_home_that_goes_over_is_of_one_of_both_runs_whenever_the_disk_is_full(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    home.prepare()
    first, second = signed_of(tmp_path, "first"), signed_of(tmp_path, "second")
    home.bind_run(first)
    keep_a_checkpoint(home)
    given = {"home": home.root, "bootstrap": ["192.0.2.1:1"], "follow": True}
    address = "/ip4/192.0.2.2/tcp/1/p2p/x"
    home.follow(second.run_id, address)
    entry: Any = daemon_of(load_config(given, {}), home)._entry(None)
    left = iter(range(writes))

    def replace_until_full(path: Path, data: bytes) -> None:
        if next(left, None) is None:
            raise OSError(ENOSPC, "No space left on device")
        replace_file(path, data)

    monkeypatch.setattr(home_file, "replace_file", replace_until_full)
    with nullcontext() if writes == 3 else pytest.raises(HomeError, match="No space left"):
        entry.keywords["following"].move(second)
    monkeypatch.undo()
    assert home.run() == (second if writes == 3 else first)
    config = run_file._as_followed(load_config(given, {}), home)
    again: Any = daemon_of(config, home)._entry(None)
    if writes == 0:
        assert (again.func, again.args[0]) == (come_back, first), "nothing has moved"
        assert (home.checkpoints_dir / "000001-step-50").is_dir()
    else:
        assert address in (again.args[0] if writes < 3 else again.args[1])
        assert again.func is (join if writes < 3 else come_back), "it goes on there"


def test_a_home_that_followed_founds_another_run_with_the_options_that_it_is_given(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.prepare()
    home.bind_run(signed_of(tmp_path, "first"))
    home.follow("cd" * 16, "/ip4/192.0.2.2/tcp/1/p2p/x")
    given: list[PeerConfig] = []

    async def note(config: PeerConfig, _: RunSpec | None, home: Home) -> ExitCode:
        await trio.lowlevel.checkpoint()
        given.append(config)
        return ExitCode.OK

    monkeypatch.setattr(run_file, "_run_daemon", note)
    config = load_config({"home": home.root, "follow": True, "data": "stdlib"}, {})
    run_peer(config, Start(toml_of(tmp_path, "second"), new_run=True))
    assert [(each.data, each.bootstrap) for each in given] == [("stdlib", ())]
