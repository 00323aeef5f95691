"""One model of the study: trained, or found where it was left.

What a model leaves is the log-probability that it gives each true token of the held-out blocks of
every domain, and, where experts begin with it, its weights at the branch. Both lie in the cache by
the digest of all that they depend on, so rules of combination are tried without training again.
"""

import hashlib
import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from bench.lone_tokens import commit
from bench.quality.feed import Feed
from bench.report import machine
from peer.runtime.files import replacing
from peer.training.corpus.packed import InvalidCorpus
from peer.training.device import choose_device, choose_precision
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.schedule import learning_rate
from peer.training.step import Stepper
from protocol.experts.ensemble import RULES, compare, loss_of
from protocol.experts.matrix import MarginalGain, gain_of
from protocol.run.needs import BYTE_VOCABULARY, training_flops

from .arms import BRANCH, LABELS, Ensemble, Training, seed_of, trainings_of, unequal_steps
from .domains import MIX, Texts
from .settings import ExpertSetting

Told = npt.NDArray[np.float32]
"""Log-probabilities of true tokens, [blocks, tokens]."""


@dataclass(slots=True)
class Found:
    """The result of one arm; losses are nats per byte of held-out text.

    Attributes:
        members: names of its models.
        body_flops, flops: of all that was trained for it, seeds too: without embeddings and head,
            and with them.
        alone: each model's loss, by domain.
        together: the ensemble's loss, by rule and domain.
        curves: (FLOPs, loss on its own domain) of each expert.
        texts: their digest.
        loss: mean over the trained domains, by the default rule.
    """

    arm: dict[str, Any]
    setting: dict[str, Any]
    seed: int
    members: list[str]
    body_flops: float
    flops: float
    alone: dict[str, list[float]]
    together: dict[str, dict[str, float]]
    curves: dict[str, list[tuple[float, float]]]
    texts: str
    loss: float = 0.0
    seconds: float = 0.0
    commit: str = ""
    command: str = ""
    machine: dict[str, Any] = field(default_factory=machine)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that has been trained.

    Attributes:
        told: by domain.
        curve: FLOPs, and loss on its own domain.
        branch_P: its weights at the branch, where it got there.
    """

    told: dict[str, Told]
    curve: list[tuple[float, float]]
    branch_P: npt.NDArray[np.float32] | None


class Studio:
    """Trains the models of one seed, each once."""

    def __init__(self, setting: ExpertSetting, seed: int, cache: Path) -> None:
        self._setting, self._seed = setting, seed
        self._folder = cache / "experts"
        self._commit = commit()  # of the code that is loaded, whatever comes while it runs
        self._device = choose_device("auto")
        self._precision = choose_precision(setting.precision, self._device)

    @cached_property
    def _texts(self) -> Texts:
        return Texts.gather(self._setting.domains, self._setting.text_bytes)

    def model(self, training: Training) -> Model:
        """Raises InvalidCorpus where a domain has too little text."""
        path = self._folder / f"{self._digest(training)}.npz"
        if not path.exists():
            started_s = time.perf_counter()
            made = self._train(training)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as out:
                np.savez(out, allow_pickle=False, **_arrays(made))
            took_s = time.perf_counter() - started_s
            print(f"{training.name}, seed {self._seed}: {took_s:.0f} s", flush=True)
        with np.load(path) as arrays:
            return _model(dict(arrays))

    def found(self, ensemble: Ensemble) -> Found:
        """Train the models of an arm that are missing, and measure it by every rule."""
        started_s = time.perf_counter()
        models = [self.model(member) for member in ensemble.members]
        alone, together = combined([model.told for model in models])
        flops = self._flops(ensemble)
        trained = [each.name for each in self._setting.domains if each.is_trained]
        result = Found(
            asdict(ensemble),
            asdict(self._setting),
            self._seed,
            [member.name for member in ensemble.members],
            flops[0],
            flops[1],
            alone,
            together,
            {m.name: x.curve for m, x in zip(ensemble.members, models, strict=True)},
            self._texts.digest(),
            commit=self._commit,
            command=shlex.join(["python", "-m", "bench.experts", *sys.argv[1:]]),
        )
        result.loss = float(np.mean([together["fixed share"][name] for name in trained]))
        result.seconds = round(time.perf_counter() - started_s, 1)
        return result

    def by_gain(self, name: str, equal: Ensemble) -> Ensemble:
        """Experts whose steps follow what the equal ones gained by the half of theirs."""
        gains = {m.domain: _half_way(self.model(m).curve) for m in equal.members}
        return unequal_steps(name, sorted(LABELS, key=lambda domain: gains[domain].per_flop))

    def _flops(self, ensemble: Ensemble) -> tuple[float, float]:
        body, whole = 0.0, 0.0
        for training, parts in trainings_of(ensemble).items():
            spec = self._setting.spec_of(training, self._seed, parts)
            flops = training_flops(spec)
            tokens = spec.training.total_steps * spec.tokens_per_step
            whole += flops
            body += flops - tokens * 6 * BYTE_VOCABULARY * spec.model.hidden_size
        return body, whole

    def _digest(self, training: Training) -> str:
        sections = asdict(training) | {"name": ""}
        tree = [asdict(self._setting) | {"name": ""}, sections, self._seed, self._texts.digest()]
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:24]

    def _train(self, training: Training) -> Model:
        setting = self._setting
        spec = setting.spec_of(training, self._seed)
        module = initial_module(spec, BYTE_VOCABULARY)
        model = FlatModel(module, self._device)
        if training.begins_with_seed:
            branch_P = self.model(seed_of(training.size)).branch_P
            assert branch_P is not None
            model.theta_P.copy_(torch.from_numpy(branch_P))
        optimizer = inner_optimizer(model, spec.optimizer, self._precision)
        stepper = Stepper(model, optimizer, self._precision, setting.batch_size)
        corpus = self._texts.corpus(training.domain, spec.model.context_length)
        feed = Feed(corpus, self._seed, setting.batch_size, 1)
        per_step = training_flops(spec) / spec.training.total_steps
        curve, branch = list[tuple[float, float]](), None
        for step in range(1, setting.steps_of(training.trained_parts) + 1):
            rate = learning_rate(spec.optimizer, step - 1, spec.training.total_steps)
            stepper.step(feed.next_blocks()[0], rate)
            if training.domain != MIX and step % setting.curve_every == 0:
                blocks_BT = corpus.validation_blocks(setting.curve_blocks)
                curve.append((step * per_step, stepper.loss_of(blocks_BT)))
            if training == seed_of(training.size) and step == setting.steps_of(BRANCH):
                branch = model.theta_P.detach().cpu().numpy().copy()
        return Model(self._told(module), curve, branch)

    def _told(self, module: torch.nn.Module) -> dict[str, Told]:
        found = {}
        for domain in self._setting.domains:
            corpus = self._texts.corpus(domain.name, self._context_length)
            if corpus.held_out_blocks < self._setting.final_blocks:
                raise InvalidCorpus(f"{domain.name} has too little text: {corpus.held_out_blocks}")
            blocks_BT = corpus.validation_blocks(self._setting.final_blocks)
            found[domain.name] = true_log_probs(module, torch.from_numpy(blocks_BT), self._device)
        return found

    @property
    def _context_length(self) -> int:
        return self._setting.spec(self._seed).model.context_length


def true_log_probs(module: torch.nn.Module, blocks_BT: torch.Tensor, device: torch.device) -> Told:
    """Log-probability of the true token at each place but the first; [B, T + 1] to [B, T]."""
    parts = []
    with torch.no_grad():
        for tokens_bT in blocks_BT.to(device).split(8):
            log_probs_bTV = functional.log_softmax(module(input_ids=tokens_bT[:, :-1]).logits, -1)
            parts.append(log_probs_bTV.gather(-1, tokens_bT[:, 1:, None]).squeeze(-1).cpu())
    told: Told = torch.cat(parts).float().numpy()
    return told


def combined(
    told: list[dict[str, Told]],
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Losses by domain of each model alone, and by rule and domain of all together."""
    alone = {name: [loss_of(each[name]) for each in told] for name in told[0]}
    compared = {name: compare(np.stack([each[name] for each in told])) for name in told[0]}
    together = {rule: {name: each[rule] for name, each in compared.items()} for rule in RULES}
    return alone, together


def _half_way(curve: list[tuple[float, float]]) -> MarginalGain:
    gain = gain_of(curve[: (len(curve) + 1) // 2])
    assert gain is not None, "three points at the least"
    return gain


def _arrays(model: Model) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {f"told-{k}": told for k, told in model.told.items()}
    arrays["curve"] = np.array(model.curve, np.float64).reshape(-1, 2)
    return arrays if model.branch_P is None else arrays | {"branch": model.branch_P}


def _model(arrays: dict[str, npt.NDArray[Any]]) -> Model:
    told = {k.removeprefix("told-"): a for k, a in arrays.items() if k.startswith("told-")}
    curve = [(float(flops), float(loss)) for flops, loss in arrays["curve"]]
    return Model(told, curve, arrays.get("branch"))
