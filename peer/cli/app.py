"""`loco-peer`: the commands and their options. The files beside this one say what they do.

`--help` must be quick, so nothing heavy is imported before a command needs it.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .reporting import reported

app = typer.Typer(
    help="Train one language model on machines rented anywhere, with no coordinator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def new(
    run_toml: Annotated[Path, typer.Argument(metavar="RUN.toml", help="File to write.")],
    preset: Annotated[
        str, typer.Option("--preset", metavar="demo|125m|1b", help="Sizes to begin with.")
    ] = "demo",
    method: Annotated[
        str,
        typer.Option(
            "--method", metavar="noloco|diloco|gasloc|streaming", help="How peers average."
        ),
    ] = "noloco",
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it is there.")
    ] = False,
) -> None:
    """Write a run spec with every key explained."""
    from .new import write_new

    with reported():
        write_new(run_toml, preset, method, force=force)
        print(f"wrote {run_toml}; look it over, then: loco-peer start {run_toml}")


@app.command()
def start(
    run_toml: opt.RunToml,
    home: opt.Home = None,
    bootstrap: opt.Bootstrap = None,
    listen: opt.Listen = None,
    announce: opt.Announce = None,
    metrics: opt.Metrics = None,
    device: opt.Device = None,
    threads: opt.Threads = None,
    overlap_steps: opt.OverlapSteps = None,
    checkpoint_activations: opt.CheckpointActivations = None,
    log_format: opt.LogFormat = None,
    verbose: opt.Verbose = None,
    grace: opt.Grace = None,
    max_upload_mbps: opt.MaxUpload = None,
    max_download_mbps: opt.MaxDownload = None,
    exit_when_done: opt.ExitWhenDone = None,
    json_ready: opt.JsonReady = None,
) -> None:
    """Found a run, be its first peer, and print the line by which others join."""
    given = {name.replace("_", "-"): v for name, v in locals().items() if name != "run_toml"}
    _run(given, run_toml)


@app.command()
def join(
    home: opt.Home = None,
    bootstrap: opt.Bootstrap = None,
    listen: opt.Listen = None,
    announce: opt.Announce = None,
    metrics: opt.Metrics = None,
    device: opt.Device = None,
    threads: opt.Threads = None,
    overlap_steps: opt.OverlapSteps = None,
    stage: opt.Stage = None,
    checkpoint_activations: opt.CheckpointActivations = None,
    log_format: opt.LogFormat = None,
    verbose: opt.Verbose = None,
    grace: opt.Grace = None,
    max_upload_mbps: opt.MaxUpload = None,
    max_download_mbps: opt.MaxDownload = None,
    exit_when_done: opt.ExitWhenDone = None,
    json_ready: opt.JsonReady = None,
) -> None:
    """Join a run; everything else comes from the swarm."""
    given = {name.replace("_", "-"): v for name, v in locals().items()}
    _run(given, None)


def _run(given: dict[str, object], run_toml: Path | None) -> None:
    with reported(verbose=bool(given["verbose"])):
        from peer.options.config import load_config

        from .first_line import say_starting

        config = load_config(given, os.environ)
        say_starting(config)
        from .run import run_peer  # after the first line, because it imports for a while

        raise typer.Exit(run_peer(config, run_toml))


@app.command()
def status(
    home: opt.Home = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: opt.Verbose = None,
) -> None:
    """Show what the daemon of this home is doing."""
    from .client import show_status

    with reported(verbose=bool(verbose)):
        show_status(home, as_json=as_json)


@app.command()
def leave(home: opt.Home = None, verbose: opt.Verbose = None) -> None:
    """Make the daemon of this home leave the swarm gracefully, and wait until it has."""
    from .client import leave_swarm

    with reported(verbose=bool(verbose)):
        leave_swarm(home)


@app.command()
def export(
    hf: Annotated[
        Path, typer.Option("--hf", metavar="DIR", help="Write a Hugging Face checkpoint here.")
    ],
    home: opt.Home = None,
    verbose: opt.Verbose = None,
) -> None:
    """Export the slow weights as they are now."""
    from .client import export_checkpoint

    with reported(verbose=bool(verbose)):
        export_checkpoint(home, hf)
        print(f"wrote {hf}")


@app.command()
def generate(
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What is continued.")],
    hf: Annotated[
        Path | None,
        typer.Option("--hf", metavar="DIR", help="An export. Default: the peer of this home."),
    ] = None,
    home: opt.Home = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, metavar="N", help="Tokens to write. Default: up to 200."),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0 takes the likeliest token always.")
    ] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", min=0.01, max=1, help="Draw from the likeliest that make up this share."
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same text for the same.")] = 0,
    without_stages: Annotated[
        str | None,
        typer.Option("--without-stages", metavar="N,M", help="Leave the layers of these out."),
    ] = None,
    verbose: opt.Verbose = None,
) -> None:
    """Write text with the run's model, with all stages or without some."""
    with reported(verbose=bool(verbose)):
        from peer.state.generation import Sampling

        from .generate import Source, write_text

        sampling = Sampling(tokens, temperature, top_p, seed)
        write_text(Source(hf, home, without_stages), prompt, sampling)


@app.command()
def plan(
    run_toml: opt.RunToml,
    peers: Annotated[
        Path, typer.Option("--peers", metavar="CSV", help="Machines on offer, one a line.")
    ],
    links: Annotated[
        Path | None,
        typer.Option("--links", metavar="CSV", help="Links; pairs left out go by location."),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option("--stages", metavar="N", help="Parts of the model. Default: as in the spec."),
    ] = None,
    visited: Annotated[
        int | None,
        typer.Option(
            "--visited", metavar="N", help="Stages on a path. Default: as in the spec, or 3 of 4."
        ),
    ] = None,
    full_every: Annotated[
        int | None,
        typer.Option(
            "--full-every", metavar="K", help="Every K-th iteration skips nothing; 0: none does."
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option("--microbatches", metavar="N", help="Of one iteration, of all together."),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences", min=1, metavar="N", help="Of one microbatch. Default: as in the spec."
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option("--codec", metavar="fp32|bf16|int8|int4", help="What travels between stages."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw the timeline: a .png or .svg file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: opt.Verbose = None,
) -> None:
    """Say what machines would do together, before they are paid for."""
    from .plan import PlanOptions, show_plan

    with reported(verbose=bool(verbose)):
        options = PlanOptions(stages, visited, full_every, microbatches, sequences, codec)
        show_plan(run_toml, peers, links, options, picture=picture, as_json=as_json)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as version_of

    print(version_of("loco-peer"))
