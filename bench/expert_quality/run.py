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
from collections.abc import Iterable
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
from peer.training.corpus.blocks import Corpus
from peer.training.corpus.packed import InvalidCorpus
from peer.training.device import choose_device, choose_precision
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.schedule import learning_rate
from peer.training.step import Stepper
from protocol.experts.ensemble import RULES, compare, loss_of
from protocol.experts.matrix import MarginalGain, gain_of
from protocol.run.needs import BYTE_VOCABULARY, training_flops
from protocol.run.run_spec import RunSpec

from .arms import BRANCH, LABELS, Ensemble, Training, seed_of, trainings_of, unequal_steps
from .domains import MIX, Texts
from .settings import ExpertSetting
from .trunk import ROUTER_PARTS, ROUTER_RATE, Holder, Trunk, mixture_of, train_together

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


@dataclass(frozen=True, slots=True)
class Begun:
    """A model in training."""

    spec: RunSpec
    module: torch.nn.Module
    model: FlatModel
    stepper: Stepper
    corpus: Corpus
    feed: Feed

    def rate(self, step: int) -> float:
        return learning_rate(self.spec.optimizer, step, self.spec.training.total_steps)

    def step(self, rate: float) -> None:
        self.stepper.step(self.feed.next_blocks()[0], rate)


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
        result = self._result(
            ensemble, [member.name for member in ensemble.members], alone, together
        )
        result.curves = {m.name: x.curve for m, x in zip(ensemble.members, models, strict=True)}
        result.body_flops, result.flops = self._flops(trainings_of(ensemble).items())
        result.seconds = round(time.perf_counter() - started_s, 1)
        return result

    def found_trunk(self, trunk: Trunk) -> Found:
        """The same for experts that share a trunk."""
        started_s = time.perf_counter()
        modules = self._of_trunk(trunk)
        body, whole = self._flops(trunk.trained)
        if trunk.is_mixture:
            module, gates = mixture_of(modules)
            router = self._train_gates(module, gates)
            modules, body, whole = [module], body + router, whole + router
        alone, together = combined([self._told(module) for module in modules])
        names = [trunk.name] if trunk.is_mixture else [each.name for each in trunk.members]
        result = self._result(trunk, names, alone, together)
        result.body_flops, result.flops = body, whole
        result.seconds = round(time.perf_counter() - started_s, 1)
        return result

    def _result(
        self,
        arm: Ensemble | Trunk,
        members: list[str],
        alone: dict[str, list[float]],
        together: dict[str, dict[str, float]],
    ) -> Found:
        trained = [each.name for each in self._setting.domains if each.is_trained]
        return Found(
            asdict(arm),
            asdict(self._setting),
            self._seed,
            members,
            0.0,
            0.0,
            alone,
            together,
            {},
            self._texts.digest(),
            loss=float(np.mean([together["fixed share"][name] for name in trained])),
            commit=self._commit,
            command=shlex.join(["python", "-m", "bench.experts", *sys.argv[1:]]),
        )

    def by_gain(self, name: str, equal: Ensemble) -> Ensemble:
        """Experts whose steps follow what the equal ones gained by the half of theirs."""
        gains = {m.domain: _half_way(self.model(m).curve) for m in equal.members}
        return unequal_steps(name, sorted(LABELS, key=lambda domain: gains[domain].per_flop))

    def _flops(self, trained: Iterable[tuple[Training, int]]) -> tuple[float, float]:
        body, whole = 0.0, 0.0
        for training, parts in trained:
            spec = self._setting.spec_of(training, self._seed, parts)
            flops = training_flops(spec)
            tokens = spec.training.total_steps * spec.tokens_per_step
            whole += flops
            body += flops - tokens * 6 * BYTE_VOCABULARY * spec.model.hidden_size
        return body, whole

    def _digest(self, arm: Training | Trunk) -> str:
        sections = asdict(arm) | {"name": ""}
        if isinstance(arm, Trunk):
            sections["is_mixture"] = False  # which is made of the same weights
        tree = [asdict(self._setting) | {"name": ""}, sections, self._seed, self._texts.digest()]
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:24]

    def _begun(self, training: Training, seed: Training | None) -> Begun:
        spec = self._setting.spec_of(training, self._seed)
        module = initial_module(spec, BYTE_VOCABULARY)
        model = FlatModel(module, self._device)
        if seed is not None:
            branch_P = self.model(seed).branch_P
            assert branch_P is not None
            model.theta_P.copy_(torch.from_numpy(branch_P))
        optimizer = inner_optimizer(model, spec.optimizer, self._precision)
        stepper = Stepper(model, optimizer, self._precision, self._setting.batch_size)
        corpus = self._texts.corpus(training.domain, spec.model.context_length)
        feed = Feed(corpus, self._seed, self._setting.batch_size, 1)
        return Begun(spec, module, model, stepper, corpus, feed)

    def _train(self, training: Training) -> Model:
        setting = self._setting
        seed = seed_of(training.size) if training.begins_with_seed else None
        begun = self._begun(training, seed)
        per_step = training_flops(begun.spec) / begun.spec.training.total_steps
        branch_at = training.stops_at or (BRANCH if training == seed_of(training.size) else 0)
        curve, branch = list[tuple[float, float]](), None
        for step in range(1, setting.steps_of(training.trained_parts) + 1):
            begun.step(begun.rate(step - 1))
            if training.domain != MIX and step % setting.curve_every == 0:
                blocks_BT = begun.corpus.validation_blocks(setting.curve_blocks)
                curve.append((step * per_step, begun.stepper.loss_of(blocks_BT)))
            if step == setting.steps_of(branch_at):
                branch = begun.model.theta_P.detach().cpu().numpy().copy()
        return Model(self._told(begun.module), curve, branch)

    def _of_trunk(self, trunk: Trunk) -> list[torch.nn.Module]:
        """The trained experts."""
        seed = trunk.seeds[0] if trunk.seeds else None
        all_begun = [self._begun(member, seed) for member in trunk.members]
        path = self._folder / f"{self._digest(trunk)}.npy"
        if not path.exists():
            holders = [
                Holder(begun.model, begun.stepper.optimizer, begun.step, self._rates(begun, trunk))
                for begun in all_begun
            ]
            train_together(holders, trunk.rounds)
            with replacing(path) as out:
                np.save(out, np.stack([begun.model.theta_P.cpu().numpy() for begun in all_begun]))
        for begun, trained_P in zip(all_begun, np.load(path), strict=True):
            begun.model.theta_P.copy_(torch.from_numpy(trained_P))
        return [begun.module for begun in all_begun]

    def _rates(self, begun: Begun, trunk: Trunk) -> list[float]:
        steps = begun.spec.training.total_steps
        if not trunk.goes_on:
            return [begun.rate(step) for step in range(steps)]
        spec = self._setting.spec_of(trunk.seeds[0], self._seed)
        whole = spec.training.total_steps
        behind = self._setting.steps_of(trunk.seeds[0].trained_parts)
        places = [behind + int((step + 0.5) / steps * (whole - behind)) for step in range(steps)]
        return [learning_rate(spec.optimizer, place, whole) for place in places]

    def _train_gates(self, module: torch.nn.Module, gates: list[torch.nn.Parameter]) -> float:
        """On the mix. Returns its FLOPs: two thirds of a step's, for nothing else has gradients."""
        setting, steps = self._setting, self._setting.steps_of(ROUTER_PARTS)
        feed = Feed(
            self._texts.corpus(MIX, self._context_length), self._seed, setting.batch_size, 1
        )
        optimizer = torch.optim.AdamW(gates, lr=ROUTER_RATE, weight_decay=0.0)
        tokens = 0
        for _ in range(steps):
            blocks_BT = torch.from_numpy(feed.next_blocks()[0]).to(self._device)
            logits_BTV = module(input_ids=blocks_BT[:, :-1]).logits
            loss = functional.cross_entropy(logits_BTV.flatten(0, 1), blocks_BT[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tokens += blocks_BT[:, 1:].numel()
        return 4.0 * tokens * sum(each.numel() for each in module.parameters())

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
