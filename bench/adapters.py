"""Averages of LoRA's A and B by themselves against a frozen A: `python -m bench.adapters`

    python -m bench.adapters [--seeds 0 1] [--rates 2e-3] [--steps 400] [--base-steps 600]

A small model learns Python's source, is kept, and learns this repository's prose by adapters: in
one replica, and in two that average every H steps, each on blocks of its own. Told for each arm:

    loss        of the averaged adapters on held-out prose, nats per byte
    gap         how far the mean of the two products B A is from the product of the means, as a
                part of its length, at the worst of the averages (mean over the layers)
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from peer.training.adapter import adapted
from peer.training.corpus.folder import prepare_corpus
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper
from protocol.run.run_spec import RunSpec

MODEL = {"hidden_size": 64, "intermediate_size": 192, "num_layers": 3, "context_length": 64}
BASE_RATE, VOCABULARY = 3e-3, 256
ARMS = [("both", 1, 0), *((trains, 2, h) for h in (2, 20, 100) for trains in ("both", "b"))]


def spec_of(source: str, seed: int, trains: str | None = None) -> RunSpec:
    tree: dict[str, Any] = {
        "seed": seed,
        "model": dict(MODEL),
        "data": {"source": source, "validation_blocks": 64},
        "optimizer": {"weight_decay": 0.0},
        "training": {"batch_size": 8},
    }
    if trains is not None:
        tree["model"]["init_from"] = "the base below"
        tree["adapter"] = {"rank": 8, "alpha": 16, "trains": trains}
    return RunSpec.model_validate(tree)


class Replica:
    def __init__(self, module: nn.Module, spec: RunSpec, number: int) -> None:
        self.module = module
        self.model = FlatModel(module, torch.device("cpu"))
        optimizer = inner_optimizer(self.model, spec.optimizer, "fp32")
        self._stepper = Stepper(self.model, optimizer, "fp32", spec.training.batch_size)
        self._drawn = np.random.default_rng([spec.seed, number])
        self._batch = spec.training.batch_size

    def step(self, corpus: Any, rate: float) -> None:
        blocks = self._drawn.integers(0, corpus.num_blocks, self._batch)
        self._stepper.step(corpus.blocks(blocks), rate)

    def loss(self, corpus: Any) -> float:
        return float(self._stepper.loss_of(corpus.validation_blocks(64)))


def products(replica: Replica) -> Iterator[torch.Tensor]:
    every = dict(replica.module.named_parameters())
    for name, b in every.items():
        if ".lora_B." in name:
            yield (b @ every[name.replace(".lora_B.", ".lora_A.")]).detach().clone()


def averaged(replicas: list[Replica]) -> float:
    """Give all of them the mean; the gap."""
    each = [list(products(replica)) for replica in replicas]
    mean = torch.stack([replica.model.theta_P for replica in replicas]).mean(0)
    for replica in replicas:
        replica.model.theta_P.copy_(mean)
    wanted = [torch.stack(layers).mean(0) for layers in zip(*each, strict=True)]
    gaps = [
        float((got - want).norm() / want.norm())
        for got, want in zip(products(replicas[0]), wanted, strict=True)
    ]
    return float(np.mean(gaps))


def arm(
    base: nn.Module, seed: int, corpus: Any, steps: int, told: tuple[str, int, int], rate: float
) -> Mapping[str, Any]:
    trains, count, h = told
    spec = spec_of("stdlib", seed, trains)
    replicas = [Replica(adapted(deepcopy(base), spec), spec, n) for n in range(count)]
    gaps = [0.0]
    for step in range(1, steps + 1):
        for replica in replicas:
            replica.step(corpus, rate * min(1.0, 10 * (1 - step / (steps + 1))))
        if h and step % h == 0:
            gaps.append(averaged(replicas))
    values = replicas[0].model.layout.parameters
    loss = round(replicas[0].loss(corpus), 4)
    return {
        "trains": trains,
        "replicas": count,
        "H": h,
        "rate": rate,
        "loss": loss,
        "gap": round(max(gaps), 4),
        "sent": values,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3])
    asked = parser.parse_args()
    prose = str(Path(__file__).parent.parent / "docs" / "**" / "*.md")
    with tempfile.TemporaryDirectory() as folder:
        code, texts = (
            prepare_corpus(spec_of(source, 0), Path(folder)).open()
            for source in ("stdlib", f"text:{prose}")
        )
        for seed in asked.seeds:
            spec = spec_of("stdlib", seed)
            whole = Replica(initial_module(spec, VOCABULARY), spec, 0)
            for _ in range(asked.base_steps):
                whole.step(code, BASE_RATE)
            base = initial_module(spec, VOCABULARY)
            base.load_state_dict(whole.module.state_dict())
            print(json.dumps({"seed": seed, "base": round(whole.loss(texts), 4)}), flush=True)
            for told, rate in itertools.product(ARMS, asked.rates):
                found = arm(base, seed, texts, asked.steps, told, rate)
                print(json.dumps({"seed": seed, **found}), flush=True)


if __name__ == "__main__":
    main()
