"""The ranks beside rank 0: processes of the same program.

Any rank's end is the trainer's end, and nothing stays behind:

    a follower ends     a thread of rank 0 sees the end of its socket, says why, and ends rank 0
    rank 0 ends         the followers' sockets end (pipe.py), and Linux kills one that is stopped
    the daemon ends     rank 0's socket ends
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from peer.runtime.child_frames import READ_BYTES, FrameDecoder, PipeError, encode
from peer.runtime.child_process import how_it_ended
from peer.training.child_process import PROGRAM
from peer.training.messages import Begin, Failed, TrainerSettings
from peer.training.pipe import FROM_TRAINER

_PR_SET_PDEATHSIG: Final = 1


def start_followers(
    settings: TrainerSettings, memory: tuple[int, int], report: Callable[[Failed], None]
) -> None:
    """Start ranks 1 and up. When one ends the reason is reported, and this process exits.

    The memory is that in which ranks meet, and that of the weights, where each has a part alone.
    """
    ended = threading.Lock()

    def watch(title: str, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        failed = _last_words(line)
        status = process.wait()
        ended.acquire()  # whoever ended first is told of; this process ends with the lock
        if failed is not None:
            report(replace(failed, detail=f"{title}: {failed.detail}"))
        else:
            os.write(2, f"{title} {how_it_ended(status)}\n".encode())
        os._exit(1)

    for rank in range(1, len(settings.devices)):
        started = _start(replace(settings, rank=rank), memory)
        title = f"rank {rank} of {len(settings.devices)}"
        threading.Thread(target=watch, args=(title, *started), daemon=True).start()


def _start(
    settings: TrainerSettings, memory: tuple[int, int]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    begin = encode(Begin("follow", settings, len(memory)))
    sent = socket.send_fds(ours, [begin], memory)
    ours.sendall(begin[sent:])
    return process, ours


def _last_words(line: socket.socket) -> Failed | None:
    """Read until a follower's end; it says nothing but why it failed."""
    frames, failed = FrameDecoder(FROM_TRAINER), None
    try:
        while data := line.recv(READ_BYTES):
            for said in frames.feed(data):
                failed = said if isinstance(said, Failed) else failed
    except (OSError, PipeError):
        pass
    return failed


def die_with_rank_0() -> None:
    """Have Linux kill this process when rank 0 is gone, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
