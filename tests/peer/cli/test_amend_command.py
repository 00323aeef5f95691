"""`loco-peer amend`: what it reads, what it asks of the daemon, and what it prints."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from peer.cli import client as amend
from peer.cli.app import app
from peer.options.exit_codes import ExitCode
from peer.state.home import Home
from protocol.run.run_spec import parse_toml
from protocol.run.signed_spec import SignedSpec

TOLD = {
    "changes": [
        ["admission.mode", "open", "invite"],
        ["training.total_steps", 1200, 2000],
    ],
    "admitted": ["12D3KooWx"],
    "round": 14,
    "step": 700,
    "present": 11,
    "end": 40,
}

NEXT = {"run_id": "ab" * 16, "address": "/dns4/here/tcp/1/p2p/12D3KooWx"}
STATUS: dict[str, Any] = {"amendments": [], "successor": None}


def loco(tmp_path: Path, *given: str) -> Any:
    return CliRunner().invoke(app, ["amend", *given, "--home", str(tmp_path)])


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "changed.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the daemon was asked; it answers with TOLD."""
    requests: list[dict[str, Any]] = []

    async def answer(home: Any, request: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        requests.append({"request": request, **arguments})
        return TOLD if request == "amend" else STATUS

    monkeypatch.setattr(amend, "ask_daemon", answer)
    return requests


def test_a_file_of_the_changes_alone_is_enough(tmp_path, asked):
    text = '[training]\ntotal_steps = 2000\n[admission]\nmode = "invite"\n'
    ran = loco(tmp_path, written(tmp_path, text), "--at-round", "14")
    assert ran.exit_code == ExitCode.OK
    values = {"training.total_steps": 2000, "admission.mode": "invite"}
    assert asked == [{"request": "amend", "values": values, "at_round": 14, "dry_run": False}]
    assert ran.output == (
        "changes from round 14 on (step 700; the run is in round 11, and ends with round 40):\n"
        "  training.total_steps: 1200 -> 2000\n"
        "changes at once:\n"
        "  admission.mode: open -> invite\n"
        "  admitted: 12D3KooWx\n"
    )


def test_a_dry_run_says_would(tmp_path, asked):
    ran = loco(tmp_path, written(tmp_path, "[training]\ntotal_steps = 2000\n"), "--dry-run")
    assert asked[0]["dry_run"] is True
    assert ran.output.startswith("would change from round 14 on")


def test_show_says_what_has_been_amended(tmp_path, asked):
    ran = loco(tmp_path, "--show")
    assert (ran.output, asked) == ("nothing has been amended\n", [{"request": "status"}])


def test_show_says_which_run_follows(tmp_path, asked, monkeypatch):
    monkeypatch.setitem(STATUS, "successor", NEXT)
    told = f"successor: {NEXT['run_id']}, at {NEXT['address']}"
    assert loco(tmp_path, "--show").output == f"nothing has been amended\n{told}\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[training]\ntotal_step = 5\n", "did you mean 'total_steps'?"),
        ("[optimizer]\nlearning_rate = 0\n", "optimizer.learning_rate: "),
        ("training =", "not TOML"),
    ],
)
def test_what_is_no_run_spec_is_refused_before_anybody_is_asked(tmp_path, asked, text, told):
    ran = loco(tmp_path, written(tmp_path, text))
    assert (ran.exit_code, asked) == (ExitCode.USAGE, [])
    assert told in ran.output
    assert "changed.toml" in ran.output


def test_a_part_of_a_run_spec_is_read_beside_the_runs(tmp_path, asked):
    founder = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
    spec = parse_toml('[optimizer]\nname = "muon"\n')
    home = Home(tmp_path)
    home.prepare()
    home.bind_run(SignedSpec.signed_by(spec, founder.public_key().public_bytes_raw(), founder.sign))
    changed = written(tmp_path, "[optimizer.muon]\nlearning_rate = 0.001\n")
    assert loco(tmp_path, changed).exit_code == ExitCode.OK
    assert asked[0]["values"] == {"optimizer.muon.learning_rate": 0.001}
    ran = loco(tmp_path, written(tmp_path, '[optimizer]\nname = "adamw"\n'))
    assert ran.exit_code == ExitCode.OK  # a run spec by itself; what differs is the daemon's to say
    assert asked[1]["values"] == {"optimizer.name": "adamw"}
    ran = loco(tmp_path, written(tmp_path, "[optimizer.muon]\nlearning_rat = 0.001\n"))
    assert (ran.exit_code, "did you mean 'learning_rate'?" in ran.output) == (ExitCode.USAGE, True)


def test_a_file_must_be_named_and_be_there(tmp_path, asked):
    for given, told in (([], "loco-peer amend RUN.toml"), (["none.toml"], "cannot read none.toml")):
        ran = loco(tmp_path, *given)
        assert ran.exit_code == ExitCode.USAGE
        assert told in ran.output
    assert asked == []


def test_without_a_daemon_there_is_nobody_to_ask(tmp_path):
    ran = loco(tmp_path, written(tmp_path, "[training]\ntotal_steps = 2000\n"))
    assert ran.exit_code == ExitCode.NO_DAEMON


def test_a_successor_is_named_by_a_home_whose_daemon_says_how_it_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    other, asked = Home(tmp_path / "next"), []
    status = {"run_id": None, "address": "/ip4/8.8.8.8/tcp/1/p2p/x", "reachable_from": "here"}

    async def answer(home: Home, request: str, timeout_s: float, **arguments: Any) -> Any:
        asked.append((home.root, request, arguments))
        return status

    monkeypatch.setattr(amend, "ask_daemon", answer)
    ran = loco(tmp_path, "--successor", str(other.root))
    assert (ran.exit_code, asked) == (ExitCode.USAGE, [])
    assert "belongs to no run yet" in ran.stderr
    spec = parse_toml('name = "more"')
    other.prepare()
    signed = SignedSpec.signed_by(spec, key.public_key().public_bytes_raw(), key.sign)
    other.bind_run(signed)  # its daemon is starting, and has not come to it
    ran = loco(tmp_path, "--successor", str(other.root))
    assert ran.exit_code == ExitCode.OK, ran.stderr
    told = {"run_id": signed.run_id, "address": status["address"]}
    assert asked == [(other.root, "status", {}), (tmp_path, "name_successor", told)]
    assert f"peers with --follow join 'more' ({signed.run_id})" in ran.output
    for given in (["--dry-run"], ["--at-round", "9"], [written(tmp_path, "seed = 1")]):
        refused = loco(tmp_path, "--successor", str(other.root), *given)
        assert (refused.exit_code, len(asked)) == (ExitCode.USAGE, 2), given
        assert "give it alone" in refused.stderr
    several = Home(tmp_path / "several")
    several.prepare()
    names = '[[experts]]\nname = "all"\n[[experts]]\nname = "code"\nsource = "text:code/*"\n'
    experts = parse_toml(f'name = "more"\n{names}')
    several.bind_run(SignedSpec.signed_by(experts, signed.founder_public_key, key.sign))
    refused = loco(tmp_path, "--successor", str(several.root))
    assert (refused.exit_code, len(asked)) == (ExitCode.USAGE, 2)
    assert "is of a run with experts" in refused.stderr
    of_itself = loco(other.root, "--successor", str(other.root))
    assert (of_itself.exit_code, len(asked)) == (ExitCode.USAGE, 2)
    assert "is of this very run; name the home of a peer" in of_itself.stderr
