"""`loco-peer plan` and `measure`, and their options: what is asked before machines are paid for.

Nothing heavy is imported before a command needs it (app.py).
"""

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .reporting import reported


def plan(
    run_toml: opt.RunToml,
    peers: Annotated[
        Path, typer.Option("--peers", metavar="CSV", help="Machines on offer, one a line.")
    ],
    links: Annotated[
        Path | None,
        typer.Option("--links", metavar="CSV", help="Links. Missing pairs: by location."),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option("--stages", metavar="N", help="Stages of the pipeline. Default: the spec's."),
    ] = None,
    visited: Annotated[
        int | None,
        typer.Option(
            "--visited", metavar="N", help="Stages on a path. Default: the spec's, or 3 of 4."
        ),
    ] = None,
    full_every: Annotated[
        int | None,
        typer.Option(
            "--full-every", metavar="K", help="Every K-th iteration skips no stage; 0: none."
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option("--microbatches", metavar="N", help="Microbatches per iteration, in total."),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences", min=1, metavar="N", help="Sequences per microbatch. Default: the spec's."
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            "--codec", metavar="fp32|bf16|int8", help="Format of values sent between stages."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw the timeline: a .png or .svg file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: opt.Verbose = None,
) -> None:
    """Estimate hours and cost of a run on machines, before you pay for them."""
    from .plan import PlanOptions, show_plan

    with reported(verbose=bool(verbose)):
        options = PlanOptions(stages, visited, full_every, microbatches, sequences, codec)
        show_plan(run_toml, peers, links, options, picture=picture, as_json=as_json)


def measure(
    run_toml: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN.toml]", help="The run spec. Default: the demo preset's."),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers", metavar="CSV", help="Add the row to this table. Default: print it."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="This machine's name. Default: host name."),
    ] = None,
    location: Annotated[
        str, typer.Option("--location", metavar="PLACE", help="Its place, such as Iowa or London.")
    ] = "here",
    price: Annotated[
        float, typer.Option("--price", min=0, metavar="DOLLARS", help="Price of an hour.")
    ] = 0.0,
    device: opt.Device = None,
    threads: opt.Threads = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, metavar="S", help="How long to time steps.")
    ] = 10.0,
    verbose: opt.Verbose = None,
) -> None:
    """Time the trainer on this machine and print its row for the table of `plan`."""
    with reported(verbose=bool(verbose)):
        from .new import preset_spec
        from .run import read_spec

        spec = preset_spec("demo") if run_toml is None else read_spec(run_toml)
        from .measure import show_measured  # imports torch, so wrong files are told before

        show_measured(spec, device, threads, seconds, (name, location, f"{price:g}"), peers)
