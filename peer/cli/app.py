"""`loco-peer`: the commands and their options. The files beside this one say what they do.

`--help` must be quick, so nothing heavy is imported before a command needs it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from peer.options.config import load_config

from . import options as opt
from .before_paying import measure, plan
from .help import Command, Commands
from .reporting import reported
from .start import Start

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def loco_peer(version: opt.Version = False) -> None:
    """Train one language model on machines rented anywhere, with no coordinator."""


@app.command(cls=Command)
def new(
    run_toml: Annotated[Path, typer.Argument(metavar="RUN.toml", help="File to write.")],
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="demo|125m|1b",
            help="Model size and settings; only demo has been run.",
        ),
    ] = "demo",
    method: Annotated[
        str,
        typer.Option("--method", metavar="noloco|diloco|streaming", help="How peers average."),
    ] = "noloco",
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="muon|adamw", help="How each peer trains.")
    ] = "muon",
    stages: Annotated[
        int,
        typer.Option(
            "--stages", min=1, metavar="N", help="Stages of a pipeline; 1 is no pipeline."
        ),
    ] = 1,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a run spec in which every key is explained."""
    from .new import write_new

    with reported():
        takes = write_new(run_toml, preset, method, optimizer, stages, force=force)
        print(*(f"  {line}" for line in takes), sep="\n")
        print(f"wrote {run_toml}; read it, then run: loco-peer start {run_toml}")


@app.command(cls=Command)
@opt.takes_peer_options
def start(
    run_toml: opt.RunTomlIfNew = None,
    new_run: opt.NewRun = False,
    restore: opt.Restore = None,
    **given: object,
) -> None:
    """Found a run as its first peer, or continue the run of this home."""
    _run(given, Start(run_toml, new_run=new_run, restore=restore))


@app.command(cls=Command)
@opt.takes_peer_options
def join(**given: object) -> None:
    """Join a run and fetch spec, data and weights; or continue the run of this home."""
    _run(given, None)


def _run(given: Mapping[str, object], start: Start | None) -> None:
    with reported(verbose=bool(given["verbose"])):
        from peer.ports.terminal import CONSOLE_LOG, outlive_terminal
        from peer.process.sigterm import end_on_sigterm

        from .first_line import say_starting

        end_on_sigterm()
        named = {name.replace("_", "-"): value for name, value in given.items()}
        config = load_config(named, os.environ)
        outlive_terminal(config.home.absolute() / CONSOLE_LOG)
        say_starting(config)
        from .run import run_peer  # after the first line, because it imports for a while

        raise typer.Exit(run_peer(config, start))


@app.command(cls=Command)
def status(
    home: opt.Home = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: opt.Verbose = None,
) -> None:
    """Show what the daemon of this home is doing; with --verbose, the peers' full ids."""
    from .client import show_status

    with reported(verbose=bool(verbose)):
        show_status(home, as_json=as_json, full_ids=bool(verbose))


@app.command(cls=Command)
def doctor(
    home: opt.Home = None,
    bootstrap: opt.Bootstrap = None,
    listen: opt.Listen = None,
    invite: opt.Invite = None,
    verbose: opt.Verbose = None,
) -> None:
    """Check this machine, its network and its peer; say what is wrong and what to do."""
    with reported(verbose=bool(verbose)):
        from .doctor import examine_here

        raise typer.Exit(examine_here(home, bootstrap, listen, invite))


@app.command(cls=Command)
def leave(home: opt.Home = None, verbose: opt.Verbose = None) -> None:
    """Make the daemon of this home leave the swarm gracefully, and wait until it has."""
    from .client import leave_swarm

    with reported(verbose=bool(verbose)):
        leave_swarm(home)


@app.command(cls=Command)
def pause(home: opt.Home = None, verbose: opt.Verbose = None) -> None:
    """Pause training when the round is done; the daemon keeps running and serves others."""
    from .client import pause_training

    with reported(verbose=bool(verbose)):
        pause_training(home)


@app.command(cls=Command)
def resume(home: opt.Home = None, verbose: opt.Verbose = None) -> None:
    """Resume training at the swarm's current step."""
    from .client import resume_training

    with reported(verbose=bool(verbose)):
        resume_training(home)


@app.command(cls=Command)
def invite(
    home: opt.Home = None,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="How long it is valid: 12h, 7d.")
    ] = "7d",
    uses: Annotated[
        int, typer.Option("--uses", metavar="N", help="How many peers may join with it.")
    ] = 1,
    verbose: opt.Verbose = None,
) -> None:
    """Print a join command for a run that admits invited peers only."""
    with reported(verbose=bool(verbose)):
        from .admission import print_invitation

        print_invitation(home, expires, uses)


@app.command(cls=Command)
def ban(peer: opt.Peer, home: opt.Home = None, verbose: opt.Verbose = None) -> None:
    """Ban a peer from the run; all peers are told."""
    _rule("ban", peer, home, verbose=bool(verbose))


@app.command(cls=Command)
def admit(peer: opt.Peer, home: opt.Home = None, verbose: opt.Verbose = None) -> None:
    """Admit a peer to the run; this also lifts a ban."""
    _rule("admit", peer, home, verbose=bool(verbose))


@app.command(cls=Command)
def delegate(peer: opt.Peer, home: opt.Home = None, verbose: opt.Verbose = None) -> None:
    """Let a peer admit, ban and invite too; `admit` revokes that."""
    _rule("delegate", peer, home, verbose=bool(verbose))


@app.command(cls=Command)
def amend(
    run_toml: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="The changed run spec, or only the changed keys."),
    ] = None,
    at_round: Annotated[
        int | None,
        typer.Option("--at-round", metavar="N", help="First changed round. Default: in 3 rounds."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Show what has been amended.")] = False,
    home: opt.Home = None,
    verbose: opt.Verbose = None,
) -> None:
    """Change length, learning rate or admission of a run under way; founder only."""
    with reported(verbose=bool(verbose)):
        from .amend import amend_run, show_amendments

        if show:
            show_amendments(home)
        else:
            amend_run(home, run_toml, at_round, dry_run=dry_run)


def _rule(verdict: str, peer: str, home: Path | None, *, verbose: bool) -> None:
    with reported(verbose=verbose):
        from protocol.admission.statements import Verdict

        from .admission import rule

        rule(home, Verdict(verdict), peer)


@app.command(cls=Command)
def export(
    hf: Annotated[
        Path, typer.Option("--hf", metavar="DIR", help="Write a Hugging Face checkpoint here.")
    ],
    swarm: Annotated[
        bool, typer.Option("--swarm", help="Export the mean of all peers that can be reached.")
    ] = False,
    home: opt.Home = None,
    verbose: opt.Verbose = None,
) -> None:
    """Export the current slow weights of this peer, or the mean of all peers."""
    from .client import export_checkpoint, home_of

    with reported(verbose=bool(verbose)):
        if swarm:
            from .swarm_export import export_swarm

            export_swarm(home_of(home), hf)
        else:
            export_checkpoint(home, hf)
        print(f"wrote {hf}")


@app.command(cls=Command)
def generate(
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Text to continue.")],
    hf: Annotated[
        Path | None,
        typer.Option(
            "--hf", metavar="DIR", help="Use this export. Default: the peer of this home."
        ),
    ] = None,
    home: opt.Home = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, metavar="N", help="Tokens to write. Default: up to 200."),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=0, metavar="X", help="0 always takes the likeliest token."
        ),
    ] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=0.01,
            max=1,
            metavar="SHARE",
            help="Draw from the likeliest tokens with this total probability.",
        ),
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            max=(1 << 63) - 1,
            metavar="N",
            help="The same seed gives the same text.",
        ),
    ] = 0,
    without_stages: Annotated[
        str | None,
        typer.Option("--without-stages", metavar="N,M", help="Leave these stages out."),
    ] = None,
    verbose: opt.Verbose = None,
) -> None:
    """Generate text with the run's model, with all stages or without some."""
    with reported(verbose=bool(verbose)):
        from peer.state.generation import Sampling

        from .generate import Source, write_text

        sampling = Sampling(tokens, temperature, top_p, seed)
        write_text(Source(hf, home, without_stages), prompt, sampling)


app.command(cls=Command)(plan)
app.command(cls=Command)(measure)


@app.command(cls=Command)
def version() -> None:
    """Print the version."""
    opt.print_version()
