"""Memory and speed of the trainer's step on a device, one setting to a process: a line of JSON.

    python -m bench.gpu_loop [--preset 125m] [--sequences 8] [--batch 64] [--optimizer muon]
        [--moments bf16] [--compile] [--recompute] [--documents] [--lora] [--device cuda]

Peaks are those of torch's allocator after the second step; `of_card_mib` is what nvidia-smi counts
of the whole card, `estimate_gb` what `new` and `start` say of such a run. Tokens are random, with
`--documents` in texts of 300 tokens on the average. With `--lora` the preset's first weights are
the base, and adapters of rank 16 are trained.
"""

import argparse
import json
import subprocess
import time
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch

from peer.cli.new import OPTIMIZERS, PRESETS, preset_spec
from peer.training.adapter import adapted
from peer.training.device import choose_precision
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import FlatOptimizer, inner_optimizer
from peer.training.step import Stepper
from protocol.run.needs import needs_of
from protocol.run.run_spec import RunSpec

from .throughput import GPT2_VOCABULARY, VOCABULARIES, seconds_of

STEPS: Final = 4
DOCUMENT_TOKENS: Final = 300
RANK: Final = 16
RATE: Final = 1e-4


def spec_of(chosen: argparse.Namespace) -> RunSpec:
    """The preset, with what the command line changes."""
    optimizer = "adamw" if chosen.lora else chosen.optimizer
    tree = preset_spec(chosen.preset, optimizer=optimizer).model_dump()
    tree["optimizer"]["moments"] = chosen.moments
    tree["training"] |= {"micro_batch": chosen.sequences, "batch_size": chosen.batch}
    tree["training"]["compile"], tree["data"]["mask_documents"] = chosen.compile, chosen.documents
    if chosen.lora:
        tree["model"]["init_from"] = "the preset's first weights"
        tree["adapter"] = {"rank": RANK, "alpha": 2 * RANK}
    return RunSpec.model_validate(tree)


def blocks_of(spec: RunSpec, vocabulary: int, *, documents: bool) -> Any:
    """Random tokens, [B, T+1]; 0 ends a document."""
    draws = np.random.default_rng(0)
    shape = (spec.training.batch_size, spec.model.context_length + 1)
    blocks_BT = draws.integers(1, vocabulary, shape, dtype=np.int64)
    if documents:
        blocks_BT[draws.random(shape) < 1 / DOCUMENT_TOKENS] = 0
    return blocks_BT


def built(
    chosen: argparse.Namespace, spec: RunSpec, vocabulary: int
) -> tuple[FlatModel, FlatOptimizer, Stepper]:
    """The trainer's parts on the device."""
    device = torch.device(chosen.device)
    precision = choose_precision(spec.training.precision, device)
    module = initial_module(preset_spec(chosen.preset), vocabulary)
    if chosen.lora:
        module = adapted(module, spec)
    end = 0 if chosen.documents else None
    model = FlatModel(module, device, compile=chosen.compile, document_end=end)
    if chosen.recompute:
        model.recompute()
    optimizer = inner_optimizer(model, spec.optimizer, precision)
    return model, optimizer, Stepper(model, optimizer, precision, chosen.sequences)


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """One setting; its settings stand before what was found."""
    spec, vocabulary = spec_of(chosen), VOCABULARIES.get(chosen.preset, GPT2_VOCABULARY)
    blocks_BT = blocks_of(spec, vocabulary, documents=chosen.documents)
    model, optimizer, stepper = built(chosen, spec, vocabulary)

    def train(steps: int) -> None:
        for _ in range(steps):
            result = stepper.step(blocks_BT, RATE)
        result.settled()  # waits for the device

    def move(steps: int) -> None:
        for _ in range(steps):
            norm = optimizer.step(0.0)
        float(norm)

    first_s = seconds_of(lambda: train(1))
    train(1)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began_s = time.perf_counter()
    train(STEPS)
    step_s = (time.perf_counter() - began_s) / STEPS
    found = {
        **vars(chosen),
        "parameters": model.layout.parameters,
        "first_s": round(first_s, 2),
        "step_ms": round(1e3 * step_s, 1),
        "tokens_per_s": round(spec.tokens_per_step / step_s),
        "optimizer_ms": round(1e3 * seconds_of(lambda: move(STEPS)) / STEPS, 2),
    }
    if on_gpu:
        found |= {
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
            "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
            "of_card_mib": of_card_mib(),
        }
    if not chosen.lora:  # the sizes of a checkpoint are not known by the spec
        needs = needs_of(spec, 1, recomputes=chosen.recompute)
        found["estimate_gb"] = round((needs.gpu_memory if on_gpu else needs.cpu_memory) / 1e9, 2)
    return found


def of_card_mib() -> int | None:
    """Used on the first card; None where nobody tells."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.CalledProcessError, ValueError):
        done = subprocess.run(query, capture_output=True, text=True, check=True)
        return int(done.stdout.splitlines()[0])
    return None


def main() -> None:
    """Measure one setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="125m")
    parser.add_argument("--sequences", type=int, default=8, help="at once")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="muon")
    parser.add_argument("--moments", choices=("fp32", "bf16"), default="fp32")
    for name in ("compile", "recompute", "documents", "lora"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    print(json.dumps(measure(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
