"""The commands and their options, frozen: a new one is a decision."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from peer.cli.app import app
from peer.cli.options import COMMANDS, EXAMPLES, GROUPS
from peer.options.config import OPTIONS

PEER_OPTIONS = [
    "--alone",
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
    "--export-when-done",
    "--grace",
    "--home",
    "--json-ready",
    "--listen",
    "--log-format",
    "--max-download-mbps",
    "--max-upload-mbps",
    "--metrics",
    "--metrics-host",
    "--notices",
    "--notify",
    "--metrics-token",
    "--overlap-steps",
    "--price-per-hour",
    "--relay-mbps",
    "--threads",
    "--upload-keys",
    "--verbose",
    "-v",
]

JOIN_OPTIONS = [*PEER_OPTIONS, "--invite", "--max-corpus-gb", "--stage", "--yes"]

FROZEN = {
    "new": ["--experts", "--force", "--method", "--optimizer", "--preset", "--stages", "run_toml"],
    "start": sorted([*PEER_OPTIONS, "--new-run", "--restore", "run_toml"]),
    "join": sorted(JOIN_OPTIONS),
    "status": ["--health", "--home", "--json", "--verbose", "-v"],
    "invite": ["--expires", "--home", "--uses", "--verbose", "-v"],
    "ban": ["--home", "--verbose", "-v", "peer"],
    "admit": ["--home", "--verbose", "-v", "peer"],
    "delegate": ["--home", "--verbose", "-v", "peer"],
    "amend": ["--at-round", "--dry-run", "--home", "--show", "--verbose", "-v", "run_toml"],
    "doctor": ["--bootstrap", "--home", "--invite", "--listen", "--verbose", "-v"],
    "top": ["--home", "--verbose", "-v"],
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
    "measure": [
        "--device",
        "--location",
        "--name",
        "--peers",
        "--price",
        "--seconds",
        "--threads",
        "--verbose",
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
    assert long == set(OPTIONS)


def test_every_option_is_explained() -> None:
    group = typer.main.get_group(app)
    for name, command in group.commands.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", ""), (name, parameter.name)


def test_help_goes_by_two_names() -> None:
    for flag in ("-h", "--help"):
        assert CliRunner().invoke(app, [flag]).exit_code == 0


def help_of(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("command", ["start", "join", "plan"])
def test_many_options_stand_in_groups(command: str) -> None:
    shown = help_of(command)
    rest = shown.partition("\nOptions:\n")[2].partition("\n\n")[0]
    assert "--help" in rest
    assert len(rest.splitlines()) == 1, "give the others a group in peer/cli/options.py"
    for title in {"start": ("Run", "Network", "Disk"), "plan": ("Pipeline",)}.get(command, ()):
        assert f"\n{title}:\n" in shown


def test_no_summary_is_cut_off_and_no_type_or_huge_range_is_shown() -> None:
    group = typer.main.get_group(app)
    for shown in (help_of(), *(help_of(name) for name in group.commands)):
        assert "..." not in shown.replace("[OPTIONS] COMMAND [ARGS]...", "")
        assert not re.search("<(int|float|path|str|text)", shown)
        assert "x<=" not in shown
        assert "x>=" not in shown
    told = " ".join(help_of().split())
    for command in group.commands.values():
        assert " ".join(str(command.help).split()) in told


def test_groups_and_examples_name_what_is_there() -> None:
    group = typer.main.get_group(app)
    parameters = {p.name for command in group.commands.values() for p in command.params}
    assert {name for names in GROUPS.values() for name in names} <= parameters
    named = {name for names in COMMANDS.values() for name in names}
    assert named | {"version"} == set(group.commands), "commands have a group, too"
    for name, (example, then) in EXAMPLES.items():
        options = {option for p in group.commands[name].params for option in p.opts}
        assert set(re.findall("--[a-z-]+", example)) <= options
        assert f"Example:\n  {example}\n\nNext: {then}\n" in help_of(name)
    assert {"new", "start", "join", "plan", "export", "generate"} <= set(EXAMPLES)


def test_help_draws_nothing_with_rich() -> None:
    """It would take longer to import than all else that help needs."""
    code = "import sys; from peer.cli.app import app; app(['start', '-h'], standalone_mode=False);"
    code += "sys.exit('rich' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0  # noqa: PLW1510


def test_the_version_is_told_by_option_and_by_command():
    by_option, by_command = (CliRunner().invoke(app, [each]) for each in ("--version", "version"))
    assert by_option.exit_code == by_command.exit_code == 0
    assert by_option.stdout == by_command.stdout == f"{version('loco-peer')}\n"
