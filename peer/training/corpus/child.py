"""Making a corpus in a process of its own: tokenizers take hundreds of megabytes, and may hang.

    python -m peer.training.corpus.child
    stdin     the request, a line of JSON; its end is that of the daemon
    stdout    a line of JSON for each part that is done, which tells the progress; then the answer,
              JSON without an end of the line

Texts are the user's, the tokenizer may be a stranger's. A child that is killed, or silent for too
long, costs the daemon this corpus alone, and where memory is short the kernel takes it before the
daemon. What libraries print goes to stderr.
"""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from protocol.run.run_spec import RunSpec, parse_bytes
from protocol.schedule.progress import TaskProgress, Tell, nobody

from .folder import KeptCorpus, kept_corpus, prepare_corpus
from .packed import InvalidCorpus

PROGRAM: Final = "peer.training.corpus.child"
SILENCE_S: Final = 900.0
"""A child without a word for so long hangs: no text that fits into a memory takes longer."""
OOM_SCORE: Final = Path("/proc/self/oom_score_adj")
FIRST_TO_GO: Final = "1000"
"""The highest: where memory is short, the kernel ends this process before all others."""


# --- the daemon's side ----------------------------------------------------------------------------
async def prepare_in_child(
    spec: RunSpec,
    cache_dir: Path,
    source: str | None = None,
    tell: Tell = nobody,
    *,
    silence_s: float = SILENCE_S,
) -> KeptCorpus:
    """`prepare_corpus` in a child, which ends with this call.

    Raises as that does; InvalidCorpus, too, where the child dies or hangs.
    """
    told = {"spec": spec.to_bytes().decode(), "cache_dir": str(cache_dir), "source": source}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        answer = await _asked(process, json.dumps(told).encode() + b"\n", tell, silence_s)
        status = await process.wait()
    except trio.TooSlowError as error:
        how = f"said nothing for {silence_s:g} s, and was stopped"
        raise InvalidCorpus(_ended(spec, how)) from error
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.wait()
    if status or not answer:
        how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
        raise InvalidCorpus(_ended(spec, how))
    return _taken(json.loads(answer), cache_dir)


async def _asked(process: trio.Process, request: bytes, tell: Tell, silence_s: float) -> bytes:
    """The child's answer. Raises TooSlowError."""
    assert process.stdin is not None
    assert process.stdout is not None
    said = b""
    async with process.stdin, process.stdout:
        with suppress(trio.BrokenResourceError):  # it has died already
            await process.stdin.send_all(request)
        while True:
            with trio.fail_after(silence_s):
                data = await process.stdout.receive_some()
            if not data:
                return said
            *lines, said = (said + data).split(b"\n")
            if lines:
                tell(msgspec.json.decode(lines[-1], type=TaskProgress))


def _ended(spec: RunSpec, how: str) -> str:
    return (
        f"the process that tokenises {how}: perhaps memory is short, or the tokenizer"
        f" {spec.data.tokenizer!r} hangs on a text; use a larger machine, smaller files or another"
        " tokenizer"
    )


def _taken(answer: Mapping[str, Any], cache_dir: Path) -> KeptCorpus:
    """The corpus of an answer. Raises as `prepare_corpus`."""
    if "invalid" in answer:
        raise InvalidCorpus(answer["invalid"])
    if "error" in answer:
        raise OSError(*answer["error"])
    kept = kept_corpus(cache_dir, answer["digest"])
    if kept is None:
        raise InvalidCorpus(f"the corpus {answer['digest']} is not in {cache_dir} any more")
    return kept


# --- the child's side -----------------------------------------------------------------------------
def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal tells all; the daemon stops us
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        OOM_SCORE.write_text(FIRST_TO_GO)
    answers = os.dup(1)
    os.dup2(2, 1)
    told = json.loads(sys.stdin.buffer.readline())
    _end_with_input()  # what comes in would end this process, too

    def tell(progress: TaskProgress) -> None:
        os.write(answers, msgspec.json.encode(progress) + b"\n")

    os.write(answers, json.dumps(answer_of(told, tell)).encode())


def _end_with_input() -> None:
    """Let the kernel end this process when its input ends, even where a tokenizer hangs."""
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:
        sys.exit("the input ended before")


def answer_of(told: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """The outcome of a request, for `_taken`."""
    spec = parse_bytes(told["spec"].encode())
    try:
        made = prepare_corpus(spec, Path(told["cache_dir"]), told["source"], tell)
    except (InvalidCorpus, ValueError) as error:
        return {"invalid": str(error)}
    except OSError as error:
        named = error.filename and os.fsdecode(error.filename)
        return {"error": (error.errno, error.strerror, named)}
    except BaseException as error:  # noqa: BLE001 - a panic of the library's Rust is no Exception
        return {"invalid": f"the texts cannot be tokenised: {type(error).__name__}: {error}"}
    return {"digest": made.manifest_digest}


if __name__ == "__main__":
    main()
