"""The commands and their options, frozen: a new one is a decision."""

import re
import shlex
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from peer.cli.app import SHELLS, app
from peer.cli.new import ALL_PRESETS, METHODS, OPTIMIZERS
from peer.cli.options import COMMANDS, EXAMPLES, GROUPS, NEXT, examples_of
from peer.options.config import OPTIONS, check_given
from peer.options.values import TRACKERS, Cloud, LogFormat
from protocol.wire.versions import SPOKEN

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
    "--follow",
    "--gpus",
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
    "--shard-weights",
    "--split-context",
    "--threads",
    "--track",
    "--expert",
    "--upload-keys",
    "--verbose",
    "-v",
]

JOIN_OPTIONS = [*PEER_OPTIONS, "--invite", "--max-corpus-gb", "--stage", "--yes"]

FROZEN = {
    "new": [
        "--data",
        "--experts",
        "--force",
        "--method",
        "--model",
        "--optimizer",
        "--preset",
        "--seed",
        "--stages",
        "run_toml",
    ],
    "start": sorted([*PEER_OPTIONS, "--new-run", "--restore", "run_toml"]),
    "join": sorted(JOIN_OPTIONS),
    "status": ["--health", "--home", "--json", "--verbose", "-v"],
    "invite": ["--expires", "--home", "--uses", "--verbose", "-v"],
    "ban": ["--home", "--verbose", "-v", "peer"],
    "admit": ["--home", "--verbose", "-v", "peer"],
    "delegate": ["--home", "--verbose", "-v", "peer"],
    "amend": [
        "--at-round",
        "--dry-run",
        "--home",
        "--show",
        "--successor",
        "--verbose",
        "-v",
        "run_toml",
    ],
    "doctor": ["--bootstrap", "--home", "--invite", "--listen", "--verbose", "-v"],
    "top": ["--home", "--verbose", "-v"],
    "leave": ["--home", "--verbose", "-v"],
    "pause": ["--home", "--verbose", "-v"],
    "resume": ["--home", "--verbose", "-v"],
    "export": ["--as-moe", "--experts", "--hf", "--home", "--swarm", "--verbose", "-v"],
    "eval": [
        "--check",
        "--device",
        "--hf",
        "--home",
        "--json",
        "--limit",
        "--task-files",
        "--tasks",
        "--verbose",
        "-v",
    ],
    "extend": [
        "--data",
        "--force",
        "--home",
        "--replay",
        "--steps",
        "--verbose",
        "-v",
        "run_toml",
    ],
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
    "completion": ["shell"],
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


def test_groups_name_what_is_there() -> None:
    group = typer.main.get_group(app)
    parameters = {p.name for command in group.commands.values() for p in command.params}
    assert {name for names in GROUPS.values() for name in names} <= parameters
    named = {name for names in COMMANDS.values() for name in names}
    assert named | {"completion", "version"} == set(group.commands), "commands have a group, too"


# --- examples -------------------------------------------------------------------------------------
README = Path(__file__).resolve().parents[3] / "README.md"
IN_README = re.findall(r"^ {4}(?:\$ )?(loco-peer .*)$", README.read_text(), re.MULTILINE)


def parsed(line: str) -> dict[str, Any]:
    """What the real parser makes of a command line. Raises what a user would see."""
    words = takewhile(lambda word: word not in (">", ">>"), shlex.split(line))
    program, name, *arguments = words
    assert program == "loco-peer"
    with typer.main.get_group(app).commands[name].make_context(name, arguments) as context:
        given = {name.replace("_", "-"): value for name, value in context.params.items()}
    if name not in ("new", "extend"):  # their `--data` is a key of the run spec
        check_given(**{name: value for name, value in given.items() if name in OPTIONS})
    return given


@pytest.mark.parametrize("line", dict.fromkeys([*EXAMPLES, *IN_README]))
def test_examples_can_be_parsed(line: str) -> None:
    assert parsed(line) is not None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("loco-peer join --boostrap a:1", "No such option"),
        ("loco-peer join --bootstrap a", "give a host and the port"),
        ("loco-peer join a:1", "unexpected extra argument"),
        ("loco-peer generate --tokens 100", "Missing parameter"),
    ],
)
def test_an_example_that_is_wrong_would_be_found(line: str, why: str) -> None:
    with pytest.raises(Exception, match=why):
        parsed(line)


def test_each_command_shows_one_to_three_examples_of_its_own() -> None:
    commands = set(typer.main.get_group(app).commands)
    assert {line.split()[1] for line in EXAMPLES} == commands
    assert set(NEXT) < commands
    for name in commands:
        lines = examples_of(name)
        title = "Examples" if len(lines) > 1 else "Example"
        shown = "".join(f"  {line}\n" for line in lines)
        assert 1 <= len(lines) <= 3
        following = f"\nNext: {NEXT[name]}\n" if name in NEXT else ""
        assert help_of(name).endswith(f"{title}:\n{shown}{following}")


def test_commands_of_the_readme_stand_in_the_help_in_the_same_words() -> None:
    assert len(IN_README) > 5
    assert [line for line in IN_README if line not in EXAMPLES] == []


@pytest.mark.parametrize("line", examples_of("new"))
def test_examples_of_new_write_a_file(tmp_path, monkeypatch, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, shlex.split(line)[1:]).exit_code == 0
    assert (tmp_path / "run.toml").exists()


# --- choices --------------------------------------------------------------------------------------
CHOICES = {
    "--preset": ALL_PRESETS,
    "--method": METHODS,
    "--optimizer": OPTIMIZERS,
    "--log-format": LogFormat,
    "--notices": Cloud,
    "--track": TRACKERS,
    "shell": SHELLS,
}


def test_choices_that_the_help_names_are_the_real_ones() -> None:
    shown = {
        parameter.opts[0]: str(parameter.metavar).split("|")
        for command in typer.main.get_group(app).commands.values()
        for parameter in command.params
        if "|" in str(parameter.metavar)
    }
    assert shown.pop("--codec") == ["fp32", "bf16", "int8"]
    assert shown.pop("--gpus") == ["all", "N", "0,2,3"]
    assert shown == {name: [str(choice) for choice in real] for name, real in CHOICES.items()}


def test_the_version_is_told_by_option_and_by_command():
    by_option, by_command = (CliRunner().invoke(app, [each]) for each in ("--version", "version"))
    assert by_option.exit_code == by_command.exit_code == 0
    told = f"loco-peer {version('loco-peer')}\nspeaks {', '.join(SPOKEN)}\n"
    assert by_option.stdout == by_command.stdout == told
