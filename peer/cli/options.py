"""The options of the commands, each declared once.

What is not given stays None: environment or file may still say it.
"""

from pathlib import Path
from typing import Annotated

import typer

RunToml = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run spec.")]
Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Holds identity, state and logs; one run per home. Default: the user data directory.",
    ),
]
Bootstrap = Annotated[
    list[str] | None,
    typer.Option(
        "--bootstrap",
        metavar="ADDR",
        help="A peer to join by: HOST:PORT or a multiaddr. May be repeated.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="[HOST:]PORT",
        help="Listen here. Default: 31337, else a free port, kept for the next start.",
    ),
]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        "--announce",
        metavar="ADDR",
        help="An address that others reach us by, if it is another one. May be repeated.",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Serve Prometheus metrics here; port 0 picks one. Default: 127.0.0.1:0.",
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="CPU threads of the trainer.")
]
OverlapSteps = Annotated[
    int | None,
    typer.Option(
        "--overlap-steps",
        metavar="N",
        help="Train so many steps while a fragment travels. Default: the run's (DiLoCo only).",
    ),
]
Stage = Annotated[
    int | None,
    typer.Option(
        "--stage",
        metavar="N",
        help="Hold this stage of a pipeline, counted from 0. Default: the one that needs us most.",
    ),
]
CheckpointActivations = Annotated[
    bool | None,
    typer.Option(
        "--checkpoint-activations",
        help="Keep less of each microbatch, and compute it again (pipelines only).",
    ),
]
LogFormat = Annotated[
    str | None, typer.Option("--log-format", metavar="console|json", help="What goes to stderr.")
]
Verbose = Annotated[
    bool | None, typer.Option("-v", "--verbose", help="Show every event, settings, and tracebacks.")
]
Grace = Annotated[
    float | None,
    typer.Option(
        "--grace",
        metavar="SECONDS",
        help="Time to end gracefully after the first signal. Default: 8.",
    ),
]
MaxUpload = Annotated[
    float | None,
    typer.Option(
        "--max-upload-mbps",
        metavar="MBPS",
        help="Send at most so many megabits per second. Default: no limit.",
    ),
]
MaxDownload = Annotated[
    float | None,
    typer.Option(
        "--max-download-mbps",
        metavar="MBPS",
        help="Receive at most so many megabits per second. Default: no limit.",
    ),
]
ExitWhenDone = Annotated[
    bool | None,
    typer.Option(
        "--exit-when-done", help="Exit at the end of the run instead of serving its state."
    ),
]
JsonReady = Annotated[
    bool | None,
    typer.Option(
        "--json-ready", help="Print one line of JSON on stdout as soon as others can join."
    ),
]
