"""`loco-peer`: the commands, their options, and how errors end them.

`--help` must be quick, so nothing heavy is imported before a command needs it.
"""

import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from functools import partial, wraps
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Final

import typer

from peer.options.config import OPTIONS, ConfigError, check_given, load_config, refuse_experts
from peer.options.exit_codes import ExitCode
from peer.options.values import LogFormat
from protocol.errors import LocoError, Refused, Unusable, leaves

from . import options as opt
from .options import Command, Commands, Start, argument, option

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# --- how errors end a command ---------------------------------------------------------------------
def exit_code_of(error: LocoError) -> ExitCode:
    if isinstance(error, Unusable):
        return ExitCode.USAGE
    if isinstance(error, Refused):
        return ExitCode.REFUSED
    from peer.observe.control import NoDaemon

    return ExitCode.NO_DAEMON if isinstance(error, NoDaemon) else ExitCode.FAILURE


def _report(error: BaseException, *, verbose: bool) -> ExitCode:
    """Only a bug, or `verbose`, shows a traceback."""
    found = leaves(error)
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in found):
        return ExitCode.INTERRUPTED
    ours = [leaf for leaf in found if isinstance(leaf, LocoError)]
    if verbose or len(ours) < len(found):
        traceback.print_exception(error)
    if len(ours) < len(found):
        print(
            "loco-peer: this is a bug in loco-peer; please report it with the lines above",
            file=sys.stderr,
        )
        return ExitCode.FAILURE
    for sentence in dict.fromkeys(str(leaf) for leaf in ours):
        print(f"loco-peer: {sentence}", file=sys.stderr)
    return exit_code_of(ours[0])


# --- commands -------------------------------------------------------------------------------------
QUIET: Final = ("new", "version", "completion")
SHELLS: Final = ("bash", "zsh", "fish")


def command(
    handler: opt.Handler, cls: type[Command] = Command, name: str | None = None
) -> opt.Handler:
    """Make a command, whose errors end it with a sentence and an exit code.

    All but QUIET take `--verbose`; it is passed on where the handler names it.
    """
    signature = inspect.signature(handler)
    asked = "verbose" in signature.parameters

    @wraps(handler)
    def run(**given: Any) -> None:
        verbose = given["verbose"] if asked else given.pop("verbose", None)
        try:
            handler(**given)
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:
            raise typer.Exit(_report(error, verbose=bool(verbose))) from error

    if asked or handler.__name__ in QUIET:
        run.__signature__ = signature  # type: ignore[attr-defined]
    else:
        run.__signature__ = opt.extended(signature, {"verbose": (opt.Verbose, None)})  # type: ignore[attr-defined]
    return app.command(name, cls=cls)(run)


@app.callback()
def loco_peer(
    version: bool = option(
        "--version",
        "",
        "Print the version, and what it speaks to peers.",
        False,
        callback=opt.print_version,
        is_eager=True,
    ),
) -> None:
    """Train one language model on machines rented anywhere, with no coordinator."""


@partial(command, cls=opt.New)
def new(
    run_toml: Path = argument("RUN.toml", "File to write."),
    preset: str = option(
        "--preset",
        "demo|125m|1b|sft|lora",
        "Size and settings; only demo has trained to its end. sft, lora: fine-tuning.",
        "demo",
    ),
    method: str = option("--method", "noloco|diloco|streaming", "How peers average.", "noloco"),
    optimizer: str | None = option(
        "--optimizer",
        "muon|adamw",
        "How each peer trains. Default: muon; to fine-tune, adamw.",
        None,
    ),
    stages: int = option("--stages", "N", "Stages of a pipeline; 1 is no pipeline.", 1, min=1),
    data: str | None = option(
        "--data", "SOURCE", "The corpus, as text:FOLDER/*.txt. Default: the preset's.", None
    ),
    seed: int = option("--seed", "N", "For first weights and data.", 0, min=0, max=(1 << 63) - 1),
    model: str | None = option(
        "--model", "CHECKPOINT", "What to fine-tune: a folder, or a name on the hub.", None
    ),
    experts: str | None = option(
        "--experts", "NAME,NAME", "A model for each domain, beside a generalist.", None
    ),
    force: bool = option("--force", "", "Overwrite an existing file.", False),
) -> None:
    """Write a run spec in which every key is explained; without arguments, ask for them."""
    from .new import preset_spec, write_new

    names = () if experts is None else tuple(experts.split(","))
    spec = preset_spec(preset, method, optimizer, stages, data, seed, names, model)
    takes = write_new(run_toml, spec, preset, force=force)
    print(*(f"  {line}" for line in takes), sep="\n")
    print(f"wrote {run_toml}; read it, then run: loco-peer start {run_toml}")


@command
@opt.takes_peer_options
def start(
    run_toml: Path | None = argument(
        "[RUN.toml]", "The run spec; not needed if the home has a run.", None, show_default=False
    ),
    new_run: bool = option(
        "--new-run", "", "Found a new run; the home's old run is moved to old-runs/.", False
    ),
    restore: str | None = option(
        "--restore",
        "URL",
        "Fill an empty home from what --checkpoint-upload copied, and continue from it.",
        None,
    ),
    **given: object,
) -> None:
    """Found a run as its first peer, or continue the run of this home."""
    _run(given, Start(run_toml, new_run=new_run, restore=restore))


@command
@opt.takes_peer_options
def join(**given: object) -> None:
    """Join a run and fetch spec, data and weights; or continue the run of this home."""
    _run(given, None)


def _run(given: Mapping[str, object], start: Start | None) -> None:
    from peer.process.terminal import CONSOLE_LOG, end_on_sigterm, outlive_terminal

    end_on_sigterm()
    named = {name.replace("_", "-"): value for name, value in given.items()}
    config = load_config(named, os.environ)
    outlive_terminal(config.home.absolute() / CONSOLE_LOG)
    if config.log_format is LogFormat.CONSOLE:  # JSON lines are those of the event log alone
        told = f"loco-peer {version_of('loco-peer')}: starting in {config.home}"
        print(told, file=sys.stderr, flush=True)
    from .run import run_peer  # after the first line, because it imports for a while

    raise typer.Exit(run_peer(config, start))


@command
def status(
    home: opt.Home = None,
    as_json: opt.AsJson = False,
    health: bool = option(
        "--health", "", "Say whether the peer does its part: exit 0 if so, else 1.", False
    ),
    verbose: opt.Verbose = None,
) -> None:
    """Show what the daemon of this home is doing; with --verbose, the peers' full ids."""
    from .client import home_of, say_health, show_status

    if health:
        raise typer.Exit(say_health(home_of(home)))
    show_status(home_of(home), as_json=as_json, full_ids=bool(verbose))


@command
def top(home: opt.Home = None) -> None:
    """Watch the peer of this home in the terminal: the swarm, links, rounds, the log."""
    from .client import home_of, watch

    watch(home_of(home))


@command
def doctor(
    home: opt.Home = None,
    bootstrap: opt.Bootstrap = None,
    listen: opt.Listen = None,
    invite: opt.Invite = None,
) -> None:
    """Check this machine, its network and its peer; say what is wrong and what to do."""
    given = {"home": home, "bootstrap": bootstrap, "listen": listen, "invite": invite}
    config = load_config(given, os.environ)
    from .doctor import examine_here  # imports torch, so wrong options are told before

    raise typer.Exit(examine_here(config))


@command
def leave(home: opt.Home = None) -> None:
    """Make the daemon of this home leave the swarm gracefully, and wait until it has."""
    from .client import home_of, leave_swarm

    leave_swarm(home_of(home))


@command
def pause(home: opt.Home = None) -> None:
    """Pause training when the round is done; the daemon keeps running and serves others."""
    from .client import ask_now, home_of

    ask_now(home_of(home), "pause")
    print("pausing when this round is done; 'loco-peer resume' continues")


@command
def resume(home: opt.Home = None) -> None:
    """Resume training at the swarm's current step."""
    from .client import ask_now, home_of

    ask_now(home_of(home), "resume")
    print("training resumed")


@command
def invite(
    home: opt.Home = None,
    expires: str = option("--expires", "TIME", "How long it is valid: 12h, 7d.", "7d"),
    uses: int = option("--uses", "N", "How many peers may join with it.", 1),
) -> None:
    """Print a join command for a run that admits invited peers only."""
    from .client import home_of, print_invitation

    print_invitation(home_of(home), expires, uses)


@command
def ban(peer: opt.Peer, home: opt.Home = None) -> None:
    """Ban a peer from the run; all peers are told."""
    _rule("ban", peer, home)


@command
def admit(peer: opt.Peer, home: opt.Home = None) -> None:
    """Admit a peer to the run; this also lifts a ban."""
    _rule("admit", peer, home)


@command
def delegate(peer: opt.Peer, home: opt.Home = None) -> None:
    """Let a peer admit, ban and invite too; `admit` revokes that."""
    _rule("delegate", peer, home)


@command
def amend(
    run_toml: Path | None = argument(
        "RUN.toml", "The changed run spec, or only the changed keys.", None
    ),
    at_round: int | None = option(
        "--at-round", "N", "First changed round. Default: in 3 rounds.", None
    ),
    dry_run: bool = option("--dry-run", "", "Show what would change, and change nothing.", False),
    show: bool = option("--show", "", "Show what has been amended, and what follows.", False),
    successor: Path | None = option(
        "--successor", "DIR", "Home of a peer of the run that --follow leads to.", None
    ),
    home: opt.Home = None,
) -> None:
    """Change length, learning rate or admission of a run under way; founder only."""
    from .client import amend_run, home_of, name_successor, show_amendments

    if show:
        show_amendments(home_of(home))
    elif successor is not None:
        if run_toml is not None or at_round is not None or dry_run:
            raise ConfigError("--successor names the next run, and changes nothing: give it alone")
        name_successor(home_of(home), home_of(successor))
    else:
        amend_run(home_of(home), run_toml, at_round, dry_run=dry_run)


def _rule(verdict: str, peer: str, home: Path | None) -> None:
    from protocol.admission.statements import Verdict

    from .client import home_of, rule

    rule(home_of(home), Verdict(verdict), peer)


@command
def export(
    hf: Path = option("--hf", "DIR", "Write a Hugging Face checkpoint here."),
    swarm: bool = option("--swarm", "", "Export the mean of all peers that can be reached.", False),
    experts: str | None = option(
        "--experts", "NAME,NAME", "Only these experts. Default: all.", None
    ),
    as_moe: bool = option(
        "--as-moe", "", "Write one Mixtral of the experts, if it is any good.", False
    ),
    home: opt.Home = None,
) -> None:
    """Export the slow weights of this peer, the mean of all peers, or all experts of the run."""
    from .client import check_exportable, home_of

    opt.check_folder(hf, "--hf")
    own = home_of(home)
    check_exportable(own, swarm=swarm)
    from .export_experts import export_run  # imports torch

    export_run(own, hf, experts, swarm=swarm, as_moe=as_moe)
    print(f"wrote {hf}")


@command
def extend(
    run_toml: Path = argument("RUN.toml", "File to write; the model goes beside it."),
    data: str = option("--data", "SOURCE", "The new corpus, as text:FOLDER/*.txt or hf:NAME."),
    steps: int = option("--steps", "N", "Steps of the new run."),
    replay: float = option(
        "--replay", "SHARE", "Part of all tokens that are the old run's.", 0.25, min=0, max=0.99
    ),
    force: bool = option("--force", "", "Overwrite an existing file.", False),
    home: opt.Home = None,
) -> None:
    """Write a run spec that goes on with the model of this home's run, on other texts too."""
    from .client import check_exportable, home_of
    from .extend import extend_run

    if not run_toml.name:
        raise ConfigError(f"RUN.toml: {run_toml} names no file")
    opt.check_folder(run_toml.with_suffix(""), "RUN.toml")
    own = home_of(home)
    check_exportable(own)
    extend_run(own, run_toml, data, steps, replay, force=force)


@partial(command, name="eval")
def evaluate(
    check: bool = option(
        "--check", "", "Fetch the experts' weights, and check what they claim.", False
    ),
    tasks: str | None = option(
        "--tasks", "NAME,NAME", "Ask the model tasks of lm-eval, as hellaswag.", None
    ),
    hf: Path | None = option(
        "--hf", "DIR", "With --tasks: this export. Default: the peer of this home.", None
    ),
    task_files: Path | None = option(
        "--task-files", "DIR", "With --tasks: more tasks, whose Python is run.", None
    ),
    limit: int | None = option("--limit", "N", "With --tasks: examples of each.", None, min=1),
    device: opt.Device = None,
    as_json: opt.AsJson = False,
    home: opt.Home = None,
) -> None:
    """Ask a model tasks that people know; or compare the experts of a run on its domains."""
    from .client import home_of

    if tasks is not None:
        from .tasks import TaskQuestion, show_answers, tasks_named

        if check:
            raise ConfigError("--check is for the experts of a run: leave it out, or --tasks")
        check_given(device=device)
        question = TaskQuestion(tasks_named(tasks), task_files, limit, device)
        show_answers(hf, home, question, as_json=as_json)
        return
    given = {"--hf": hf, "--task-files": task_files, "--limit": limit, "--device": device}
    if named := [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{' and '.join(named)}: for --tasks alone; name some, as hellaswag")
    from .evaluate import show_evaluation

    show_evaluation(home_of(home), check=check, as_json=as_json)


@command
def generate(
    prompt: str = option("--prompt", "TEXT", "Text to continue."),
    hf: Path | None = option(
        "--hf", "DIR", "Use this export. Default: the peer of this home.", None
    ),
    home: opt.Home = None,
    tokens: int | None = option(
        "--tokens", "N", "Tokens to write. Default: up to 200.", None, min=1
    ),
    temperature: float = option(
        "--temperature", "X", "0 always takes the likeliest token.", 1.0, min=0
    ),
    top_p: float = option(
        "--top-p",
        "SHARE",
        "Draw from the likeliest tokens with this total probability.",
        1.0,
        min=0.01,
        max=1,
    ),
    seed: int = option(
        "--seed", "N", "The same seed gives the same text.", 0, min=0, max=(1 << 63) - 1
    ),
    without_stages: str | None = option("--without-stages", "N,M", "Leave these stages out.", None),
) -> None:
    """Generate text with the run's model, with all stages or without some."""
    from .generate import write_text

    write_text(hf, home, without_stages, prompt, (tokens, temperature, top_p, seed))


@command
@opt.takes_plan_options
def plan(
    run_toml: Path = argument("RUN.toml", "The run spec."),
    peers: Path = option("--peers", "CSV", "Machines on offer, one a line."),
    links: Path | None = option("--links", "CSV", "Links. Missing pairs: by location.", None),
    **given: Any,
) -> None:
    """Estimate hours and cost of a run on machines, before you pay for them."""
    from .plan import show_plan

    show_plan(run_toml, peers, links, opt.PlanOptions(**given))


@command
def measure(
    run_toml: Path | None = argument(
        "[RUN.toml]", "The run spec. Default: the demo preset's.", None
    ),
    peers: Path | None = option(
        "--peers", "CSV", "Add the row to this table. Default: print it.", None
    ),
    name: str | None = option("--name", "NAME", "This machine's name. Default: host name.", None),
    location: str = option("--location", "PLACE", "Its place, such as Iowa or London.", "here"),
    price: float = option("--price", "DOLLARS", "Price of an hour.", 0.0, min=0),
    device: opt.Device = None,
    threads: int | None = opt.spelled(OPTIONS["threads"], None),
    seconds: float = option("--seconds", "S", "How long to time steps.", 10.0, min=0),
) -> None:
    """Time the trainer on this machine and print its row for the table of `plan`."""
    from .new import preset_spec

    check_given(device=device, threads=threads)
    spec = preset_spec("demo") if run_toml is None else opt.read_spec(run_toml)
    refuse_experts(spec, "measure")
    from .measure import show_measured  # imports torch, so wrong files are told before

    show_measured(spec, device, threads, seconds, (name, location, f"{price:g}"), peers)


@command
def completion(shell: str = argument("bash|zsh|fish", "Your shell.")) -> None:
    """Print the script that makes a shell complete commands, options, choices and files."""
    from typer._completion_shared import get_completion_script  # decision 0052

    if shell not in SHELLS:
        raise ConfigError(f"no completion for '{shell}': use {' or '.join(SHELLS)}")
    variable = "_LOCO_PEER_COMPLETE"  # typer looks for this name
    print(get_completion_script(prog_name="loco-peer", complete_var=variable, shell=shell))


@command
def version() -> None:
    """Print the version, and the versions of what it speaks to peers: they share those."""
    opt.print_version()
