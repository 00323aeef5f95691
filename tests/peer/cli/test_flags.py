"""The commands and their options, frozen: a new one is a decision."""

import typer
from typer.testing import CliRunner

from peer.cli.app import app
from peer.options.config import OPTIONS

PEER_OPTIONS = [
    "--announce",
    "--bootstrap",
    "--checkpoint-activations",
    "--checkpoint-every",
    "--checkpoint-keep",
    "--checkpoint-max-gb",
    "--checkpoint-upload",
    "--data",
    "--device",
    "--exit-when-done",
    "--grace",
    "--home",
    "--json-ready",
    "--listen",
    "--log-format",
    "--max-download-mbps",
    "--max-upload-mbps",
    "--metrics",
    "--overlap-steps",
    "--quic",
    "--relay-mbps",
    "--threads",
    "--verbose",
    "-v",
]

JOIN_OPTIONS = [*PEER_OPTIONS, "--invite", "--max-corpus-gb", "--stage"]

FROZEN = {
    "new": ["--force", "--method", "--optimizer", "--preset", "--stages", "run_toml"],
    "start": sorted([*PEER_OPTIONS, "--new-run", "run_toml"]),
    "join": sorted(JOIN_OPTIONS),
    "status": ["--home", "--json", "--verbose", "-v"],
    "invite": ["--expires", "--home", "--uses", "--verbose", "-v"],
    "ban": ["--home", "--verbose", "-v", "peer"],
    "admit": ["--home", "--verbose", "-v", "peer"],
    "delegate": ["--home", "--verbose", "-v", "peer"],
    "amend": ["--at-round", "--dry-run", "--home", "--show", "--verbose", "-v", "run_toml"],
    "doctor": ["--bootstrap", "--home", "--invite", "--listen", "--verbose", "-v"],
    "leave": ["--home", "--verbose", "-v"],
    "pause": ["--home", "--verbose", "-v"],
    "resume": ["--home", "--verbose", "-v"],
    "export": ["--hf", "--home", "--swarm", "--verbose", "-v"],
    "generate": [
        "--hf",
        "--home",
        "--prompt",
        "--seed",
        "--temperature",
        "--tokens",
        "--top-p",
        "--verbose",
        "--without-stages",
        "-v",
    ],
    "plan": [
        "--codec",
        "--full-every",
        "--json",
        "--links",
        "--microbatches",
        "--peers",
        "--picture",
        "--sequences",
        "--stages",
        "--verbose",
        "--visited",
        "-v",
        "run_toml",
    ],
    "version": [],
}


def test_commands_and_options_are_these() -> None:
    group = typer.main.get_group(app)
    found = {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in group.commands.items()
    }
    assert found == FROZEN


def test_every_peer_option_is_one_of_the_configuration() -> None:
    long = {option.removeprefix("--") for option in JOIN_OPTIONS if option.startswith("--")}
    assert long == {option.name for option in OPTIONS}


def test_every_option_is_explained() -> None:
    group = typer.main.get_group(app)
    for name, command in group.commands.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", ""), (name, parameter.name)


def test_help_goes_by_two_names() -> None:
    for flag in ("-h", "--help"):
        assert CliRunner().invoke(app, [flag]).exit_code == 0
