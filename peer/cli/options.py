"""The options of the commands, each declared once.

What is not given stays None: environment or file may still say it.
"""

from pathlib import Path
from typing import Annotated

import typer


def print_version(wanted: bool = True) -> None:
    """Print the version, and be done."""
    if wanted:
        from importlib.metadata import version as version_of

        print(version_of("loco-peer"))
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
]
RunToml = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run spec.")]
RunTomlIfNew = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN.toml]",
        help="The run spec; a home that has a run needs none.",
        show_default=False,
    ),
]
NewRun = Annotated[
    bool,
    typer.Option(
        "--new-run", help="Found a new run in a home that has one, which goes to its old-runs."
    ),
]
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
StartsBootstrap = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", metavar="ADDR", hidden=True, help="Refused: `join` takes it."),
]
Invite = Annotated[
    str | None,
    typer.Option(
        "--invite",
        metavar="TOKEN",
        help="An invitation; better in LOCO_INVITE, where no list of processes shows it.",
    ),
]
Peer = Annotated[str, typer.Argument(metavar="PEER", help="A peer id, as `status` shows it.")]
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
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: a GPU if there is one."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="CPU threads of the trainer. Default: all."),
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
CheckpointEvery = Annotated[
    float | None,
    typer.Option(
        "--checkpoint-every",
        metavar="SECONDS",
        help="Write a checkpoint so often; 0 only when the peer ends. Default: 600.",
    ),
]
CheckpointKeep = Annotated[
    int | None,
    typer.Option("--checkpoint-keep", metavar="N", help="Keep so many of them. Default: 3."),
]
CheckpointMaxGb = Annotated[
    float | None,
    typer.Option(
        "--checkpoint-max-gb",
        metavar="GB",
        help="Keep fewer where they would take more than this together. Default: no limit.",
    ),
]
CheckpointUpload = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-upload",
        metavar="URL",
        help="Copy them there too, with all that --restore needs but keys: any URL of fsspec, such"
        " as s3://bucket/run, or a folder.",
    ),
]
UploadKeys = Annotated[
    bool | None,
    typer.Option(
        "--upload-keys",
        help="Copy the home's keys there too. Whoever reads that place can then sign for the run.",
    ),
]
Restore = Annotated[
    str | None,
    typer.Option(
        "--restore",
        metavar="URL",
        help="Fill an empty home from what --checkpoint-upload has copied, and go on from it.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Take the corpus from here: tokens, or a source. Default: from the other peers.",
    ),
]
MaxCorpus = Annotated[
    float | None,
    typer.Option(
        "--max-corpus-gb",
        metavar="GB",
        help="Keep at most so much of the corpus on the disk. Default: no limit.",
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format", metavar="console|json", help="What goes to stderr. Default: console."
    ),
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
RelayMbps = Annotated[
    float | None,
    typer.Option(
        "--relay-mbps",
        metavar="MBPS",
        help="Relay for peers that nobody can dial, at most so fast; 0 does not. Default: 100.",
    ),
]
Quic = Annotated[
    bool | None,
    typer.Option("--quic", help="Listen on UDP too, and use QUIC with peers that do the same."),
]
ExitWhenDone = Annotated[
    bool | None,
    typer.Option(
        "--exit-when-done", help="Exit at the end of the run instead of serving its state."
    ),
]
Alone = Annotated[
    bool | None,
    typer.Option(
        "--alone",
        help="Go on with the home's run at once, though no peer that it knows can be reached.",
    ),
]
ExportWhenDone = Annotated[
    str | None,
    typer.Option(
        "--export-when-done",
        metavar="DIR",
        help="At the end of the run, write the model here as `export` does.",
    ),
]
JsonReady = Annotated[
    bool | None,
    typer.Option(
        "--json-ready", help="Print one line of JSON on stdout as soon as others can join."
    ),
]
