"""The process of one sink of `--track`; not for people.

python -m peer.observe.sink SOCKET_FD

It alone imports the sink's library. The daemon sends a Curve and then Points, one when the one
before was answered by `Done`. A step that was handed to the library is written down before, so none
is there twice, whatever ends this process, the daemon or the machine.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from peer.runtime.child_frames import READ_BYTES, FrameDecoder, encode
from peer.runtime.files import replace_file

HANG_S: Final = 120.0
"""How long a library may take over one thing. That of wandb waits for its server for 90 s."""
LONGEST_S: Final = int(2 * HANG_S)
"""How long it may take where nobody ends this process."""
FOR_WANDB: Final = {
    "WANDB_CONSOLE": "off",
    "WANDB_HOST": "",
    "WANDB__DISABLE_META": "true",
    "WANDB__DISABLE_STATS": "true",
    "WANDB__SAVE_REQUIREMENTS": "false",
}
"""Unless the user says otherwise, it is told of the run, and not of this machine."""


class SinkMessage(Struct, frozen=True, tag=True, tag_field="kind"): ...


class Curve(SinkMessage, frozen=True):
    """The curve that a peer's points belong to; the same after every restart of its home.

    Attributes:
        project: holds the curves of all peers of the run.
        run: the run's name.
        name: of the peer, for people.
        key: of the peer in the run; nothing else has it.
        folder: for files of ours, and of libraries that name no place themselves.
    """

    sink: str
    project: str
    run: str
    name: str
    key: str
    config: dict[str, Any]
    folder: str


class Point(SinkMessage, frozen=True):
    """Attributes: time_s is Unix time."""

    step: int
    time_s: float
    values: dict[str, float]


class Done(SinkMessage, frozen=True):
    """The last thing was taken; with a reason, it was not, and this process takes no more."""

    failure: str = ""


TO_SINK: Final = msgspec.msgpack.Decoder(Curve | Point)
FROM_SINK: Final = msgspec.msgpack.Decoder(Done)


# --- the libraries --------------------------------------------------------------------------------


class Library(NamedTuple):
    log: Callable[[Point], Any]
    finish: Callable[[], Any]


def _trackio(curve: Curve) -> Library:
    import trackio

    run = trackio.init(
        project=curve.project,
        group=curve.run,
        name=curve.name,
        config=curve.config,
        resume="allow",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    return Library(lambda point: run.log(point.values, step=point.step), run.finish)


def _wandb(curve: Curve) -> Library:
    os.environ.update({**FOR_WANDB, **os.environ})
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", curve.project),
        group=curve.run,
        name=curve.name,
        id=curve.key,
        config=curve.config,
        resume="allow",
        dir=os.environ.get("WANDB_DIR", curve.folder),
    )
    return Library(lambda point: run.log(point.values, step=point.step), run.finish)


def _tensorboard(curve: Curve) -> Library:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = Path(curve.folder, curve.name)
    text = f"```\n{json.dumps(curve.config, indent=1)}\n```"
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    about = create_summary_metadata("config", "")
    first = [Summary.Value(tag="config", tensor=tensor, metadata=about)]
    first *= not folder.exists()
    writer = EventFileWriter(str(folder))

    def log(point: Point) -> None:
        values = [Summary.Value(tag=name, simple_value=of) for name, of in point.values.items()]
        summary = Summary(value=[*first, *values])
        writer.add_event(Event(wall_time=point.time_s, step=point.step, summary=summary))
        writer.flush()
        first.clear()

    return Library(log, writer.close)


LIBRARIES: Final[Mapping[str, Callable[[Curve], Library]]] = {
    "trackio": _trackio,
    "wandb": _wandb,
    "tensorboard": _tensorboard,
}


# --- the process ----------------------------------------------------------------------------------


class Sink:
    """A curve in a library, opened; a step is given to it once."""

    def __init__(self, curve: Curve) -> None:
        self._given = Path(curve.folder, f"{curve.sink}.step")
        self._given.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = -1
        with suppress(FileNotFoundError):
            self._last_step = int(self._given.read_text())
        self._library = LIBRARIES[curve.sink](curve)

    def take(self, point: Point) -> None:
        if point.step > self._last_step:
            replace_file(self._given, b"%d" % point.step)
            self._last_step = point.step
            self._library.log(point)

    def finish(self) -> None:
        self._library.finish()


def serve(line: socket.socket) -> None:
    """Give a library what the daemon says, until that ends or the library fails.

    The system ends a process that hangs, even where the daemon is gone.
    """
    frames, sink = FrameDecoder(TO_SINK), None
    while data := line.recv(READ_BYTES):
        signal.alarm(LONGEST_S)
        for message in frames.feed(data):
            try:
                if isinstance(message, Curve):
                    sink = Sink(message)
                elif sink is not None:
                    sink.take(message)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the daemon's to tell
                line.sendall(encode(Done(f"{type(error).__name__}: {error}")))
                return
            line.sendall(encode(Done()))
        signal.alarm(0)
    signal.alarm(LONGEST_S)
    if sink is not None:
        sink.finish()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, and
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a service manager: the daemon ends us
    with socket.socket(fileno=int(sys.argv[1])) as line:
        serve(line)


if __name__ == "__main__":
    main()
