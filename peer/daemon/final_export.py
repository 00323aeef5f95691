"""The model as a Hugging Face checkpoint, when the run is over (`--export-when-done`).

It is what `loco-peer export` writes, by that very command: another process, so that the memory that
it takes is given back, and what goes wrong there harms no peer.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

import trio

from peer.observe.event_names import EventName
from peer.observe.events import MAX_ERROR_CHARS, EventLog
from peer.state.home import Home

PROGRAM: Final = "from peer.cli import main; main()"


async def export_finished(home: Home, folder: Path, events: EventLog) -> None:
    """Export this peer's model to the folder, and tell how that ended."""
    command = [sys.executable, "-P", "-c", PROGRAM, "export"]
    command += ["--home", str(home.root), "--hf", str(folder)]
    try:
        ran = await trio.run_process(
            command,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        said = f"no process could be started: {error.strerror}"
    else:
        if ran.returncode == 0:
            events.emit(EventName.RUN_EXPORTED, path=str(folder))
            return
        said = ran.stderr.decode(errors="replace").strip()[-MAX_ERROR_CHARS:]
    events.emit(
        EventName.EXPORT_FAILED,
        detail=f"{said}; try again: loco-peer export --home {home.root} --hf {folder}",
    )
