"""The figures of protocol/run/needs.py in words: `new` writes them, `start` and `join` print them.

A joiner has not written the run spec. If the run may take more than LARGEST_SHARE of the free disk
or memory, its user has to agree. Pieces of the corpus come and go, so they are bounded instead, by
CORPUS_SHARE.

The tokens of a corpus are told as far as the names and sizes of its files say: nothing is known of
rows (`jsonl`, `parquet`) and of the hub. BYTES_PER_TOKEN fits English and GPT-2's tokenizer; other
texts differ by half.
"""

import glob
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.errors import InvalidRunSpec
from protocol.names import size_text
from protocol.run.needs import (
    CUDA_CONTEXT_BYTES,
    FP32_BYTES,
    SPARE_BYTES,
    Needs,
    card_memory,
    needs_of,
    parameters_of,
    shards,
)
from protocol.run.run_spec import STDLIB_BYTES, RunSpec

from .config import USUAL, ConfigError, PeerConfig
from .values import LogFormat

LARGEST_SHARE: Final = 0.5
"""Part of the free disk, or of the free memory, that a run may take unasked."""
CORPUS_SHARE: Final = 0.25
"""Part of the free disk for pieces of the corpus, where the user sets no limit."""
USUAL_MBPS: Final = 100.0
"""The line where no limit is given."""
MANY_EPOCHS: Final = 10
NOT_MEASURED: Final = (
    "estimates: memory was within a tenth in four runs on a CPU; on one GPU 0.87 to 1 of them"
)


class NotAgreed(ConfigError):
    """A run that takes much of this machine, and to which its user has not agreed."""


@dataclass(frozen=True, slots=True)
class FreeRoom:
    """Bytes that are free on this machine.

    Attributes:
        gpu: on the GPU that has the least, of those that train; None where it trains on its CPU.
        gpus: that train.
    """

    disk: int
    memory: int
    gpu: int | None = None
    gpus: int = 1


def check_agreed(config: PeerConfig, spec: RunSpec, free: FreeRoom, *, expert: str = "") -> None:
    """`expert` are the words for that of the run which this peer trains.

    Raises NotAgreed; InvalidRunSpec, where the run spec does not say what it takes.
    """
    large = _larger_than(LARGEST_SHARE, config, spec, free)
    if large and not config.yes:
        raise NotAgreed(
            f"{expert}the run '{spec.name}' may take more than half of what is free here: up to"
            f" {large}. To join nevertheless: --yes"
        )


def misfit(config: PeerConfig, spec: RunSpec, free: FreeRoom) -> str:
    """The lack of this machine for a run, or of its user's consent; empty where it fits.

    Raises InvalidRunSpec, where the run spec does not say what it takes.
    """
    if lacks := _larger_than(1.0, config, spec, free):
        return f"it takes up to {lacks}"
    large = "" if config.yes else _larger_than(LARGEST_SHARE, config, spec, free)
    return large and f"it takes up to {large}, more than half, and --yes was not given"


def _larger_than(share: float, config: PeerConfig, spec: RunSpec, free: FreeRoom) -> str:
    """Names what the run takes of which there is no such share free."""
    needs = _needs(spec, config)
    memory = needs.model_memory(on_gpu=free.gpu is not None) + _whole_in_host(config, spec, free)
    wanted = [("disk", needs.disk - SPARE_BYTES, free.disk), ("memory", memory, free.memory)]
    if free.gpu is not None and share == 1:  # nothing else is wanted of it
        wanted.append(("memory of the GPU", _gpu_memory(config, spec, needs, free), free.gpu))
    return " and ".join(
        f"{size_text(takes)} of {what} ({size_text(there)} are free)"
        for what, takes, there in wanted
        if takes > share * there
    )


def _shards(config: PeerConfig, spec: RunSpec, free: FreeRoom, gpu: int) -> bool:
    """Whether each GPU would have a part of the weights alone, with so much of it free."""
    asked, divides = config.shard_weights, config.split_context
    return shards(spec, free.gpus, gpu - CUDA_CONTEXT_BYTES, asked=asked, divides=divides)


def _gpu_memory(config: PeerConfig, spec: RunSpec, needs: Needs, free: FreeRoom) -> int:
    """The least memory of each GPU; where each has all weights, that of one alone."""
    if not _shards(config, spec, free, 0):
        return needs.gpu_memory
    return CUDA_CONTEXT_BYTES + card_memory(spec, free.gpus, sharded=True)


def _whole_in_host(config: PeerConfig, spec: RunSpec, free: FreeRoom) -> int:
    """Beside GPUs that have parts of the weights: all, and as much for what is sent of them."""
    if free.gpu is None or not _shards(config, spec, free, free.gpu):
        return 0
    return 2 * FP32_BYTES * parameters_of(spec)


def _needs(spec: RunSpec, config: PeerConfig) -> Needs:
    max_bytes = None if (most := config.checkpoint_max_gb) is None else most * 1e9
    recomputes, stage = config.checkpoint_activations, config.stage
    stage = stage if spec.pipeline.stages > 1 else None
    return needs_of(spec, config.checkpoint_keep, max_bytes, recomputes=recomputes, stage=stage)


def say_needs(
    config: PeerConfig, spec: RunSpec, corpus_tokens: int | None, *, again: bool = False
) -> None:
    """Tell people what a run takes that is new to this home.

    `again` tells of the corpus alone: the rest was said before that was there.
    """
    if again:
        lines = list(told_corpus(_steps(spec) * spec.tokens_per_step, corpus_tokens))
    else:
        lines = [f"run {spec.name}", *told_needs(spec, corpus_tokens, config)]
    if config.log_format is LogFormat.CONSOLE and lines:
        sys.stderr.write("".join(f"  {line}\n" for line in lines))
        sys.stderr.flush()


def told_needs(
    spec: RunSpec, corpus_tokens: int | None = None, config: PeerConfig = USUAL
) -> list[str]:
    """The needs of a run, one subject a line; `config` is that of this machine."""
    corpus = "the corpus on top"
    if spec.data.manifest is not None:  # it comes in pieces
        most_gb = config.max_corpus_gb
        most = "a quarter of what is free" if most_gb is None else size_text(most_gb * 1e9)
        corpus = f"of the corpus at most {most} (--max-corpus-gb)"
    try:
        needs = _needs(spec, config)
    except InvalidRunSpec:
        checkpoint = f"parameters, memory and disk are those of {spec.model.init_from}"
        return [f"{checkpoint}, which is not read yet; peers that join are told them"]
    return list(_lines(spec, config, needs, corpus, corpus_tokens))


def _lines(
    spec: RunSpec, config: PeerConfig, needs: Needs, corpus: str, corpus_tokens: int | None
) -> Iterator[str]:
    stages = spec.pipeline.stages
    which = "the largest" if config.stage is None else f"stage {config.stage}"
    in_stages = f" in {stages} stages; what follows is of {which}"
    yield f"model   {_count(needs.parameters)} parameters{in_stages * (stages > 1)}"
    yield from _memory(needs)
    yield (
        f"disk    up to {size_text(needs.disk)}: checkpoints ({config.checkpoint_keep} kept) and"
        f" what joiners read; {corpus}"
    )
    yield (
        f"tokens  {_count(needs.tokens_per_peer)} by each peer ({_steps(spec):,} steps"
        f" of {spec.tokens_per_step:,}); by all, that times the peers"
    )
    yield from told_corpus(needs.tokens_per_peer, corpus_tokens)
    yield from _line(needs, config.max_upload_mbps)
    yield f"({NOT_MEASURED})"


def told_corpus(tokens_per_peer: int, corpus_tokens: int | None) -> Iterator[str]:
    """How often the corpus is read, and a warning if that is too much or too little."""
    if not corpus_tokens:
        return
    epochs = tokens_per_peer / corpus_tokens
    said = f"corpus  {_count(corpus_tokens)} tokens: one peer reads {_times(epochs)}, four"
    yield f"{said} {_times(4 * epochs)}"
    if epochs > MANY_EPOCHS:
        yield (
            f"        more than {MANY_EPOCHS} epochs even for one peer: it will be learnt by heart;"
            " take more text, or fewer steps"
        )
    elif 4 * epochs < 1:
        yield (
            "        less than an epoch even for four peers, so part of it is never read: take"
            " more steps, or peers"
        )


def _times(epochs: float) -> str:
    return f"{epochs:.2f} of it" if epochs < 1 else f"it {epochs:,.1f} times"


def _memory(needs: Needs) -> Iterator[str]:
    at_once = f"{needs.sequences} sequence{'s' * (needs.sequences > 1)} at a time"
    yield (
        f"memory  GPU {size_text(needs.gpu_memory)} and {size_text(needs.host_memory)} of its host,"
        f" or CPU alone {size_text(needs.cpu_memory)}; with {at_once}"
    )
    if needs.most_sequences > needs.sequences:
        yield (
            f"        each further one {size_text(needs.gpu_sequence)} of the GPU, or"
            f" {size_text(needs.sequence)}; 'auto' takes what fits, up to {needs.most_sequences}"
        )


def _line(needs: Needs, limit_mbps: float | None) -> Iterator[str]:
    mbps = limit_mbps or USUAL_MBPS
    hourly = needs.bytes_per_hour(1.0, mbps * 1e6 / 8)
    steps = needs.steps_per_average
    every = "as often as it carries them" if steps is None else f"every {steps:,} steps"
    bound = "" if limit_mbps else "; bound it: --max-upload-mbps"
    yield (
        f"line    {size_text(needs.average)} each way for an average, {every}: at one step/s on"
        f" {mbps:g} Mbit/s"
    )
    yield f"        up to {size_text(hourly)} an hour each way{bound}"


def _count(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.1f}{unit}"
    return f"{number:,.0f}"


def _steps(spec: RunSpec) -> int:
    """The run ends with a whole round."""
    return spec.total_rounds * spec.sync.round_steps


BYTES_PER_TOKEN: Final = 4


def corpus_tokens_of(spec: RunSpec, source: str | None = None) -> int | None:
    """Tokens of the run's corpus, roughly, where known; `source` stands for the spec's."""
    new = _tokens_in(source or spec.data.source, spec)
    kept = 1 if spec.data.replay is None else 1 - spec.data.replay_share
    return None if new is None else round(new / kept)


def _tokens_in(source: str, spec: RunSpec) -> int | None:
    kind, _, where = source.partition(":")
    each = 1 if spec.data.tokenizer == "bytes" else BYTES_PER_TOKEN
    if kind == "stdlib":
        return STDLIB_BYTES // each
    if kind != "text":
        return None
    try:
        # Path.glob takes no absolute pattern.
        names = glob.glob(str(Path(where).expanduser()), recursive=True)  # noqa: PTH207
        size = sum(path.stat().st_size for path in map(Path, names) if path.is_file())
    except OSError:
        return None
    return size // each or None


def least_corpus_bytes(spec: RunSpec, source: str | None) -> int:
    """Bytes of the disk that the corpus will take at the least, as far as that is known."""
    if spec.data.manifest is not None:
        return 0  # it is made already, and comes in pieces
    # A token of `bytes` takes one byte; others take two or more, and may be half as many as told.
    return corpus_tokens_of(spec, source) or 0
