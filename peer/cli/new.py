"""`loco-peer new`: a run spec with every key explained.

The file is made from the run spec's own fields, so that no key is forgotten: values from a preset,
words from below the fields (protocol/run/sections.py). A key without a value becomes a comment.
Keys that people change stand at the top, so each has its section before it (`model.num_layers`):
TOML lets no section begin twice.
"""

import ast
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from peer.options.config import ConfigError, check_stages
from peer.options.needs_told import corpus_tokens_of, told_needs
from peer.runtime.files import replace_file
from protocol.run.run_spec import (
    OF_MIXTURES,
    SOURCES,
    DataSection,
    ExpertSection,
    RunSpec,
    validated,
)
from protocol.run.sections import PipelineSection, Section, section_in
from protocol.run.ways import CODECS, WAYS

SECTIONS: Final[Mapping[str, str]] = {
    "model": "A decoder: llama, qwen3, mistral, gemma3_text, mixtral, ...",
    "data": "The corpus. `start` freezes it by digest: every peer trains on the same bytes.",
    "optimizer": "Inside each peer. Steps are nominal: those of the run, not of one machine.",
    "optimizer.muon": "Muon trains the matrices of the blocks; AdamW the rest.",
    "training": "One inner step, and the length of the run.",
    "sync": "How peers average.",
    "sync.diloco": "Streaming DiLoCo: all peers average fragments, each at its moment.",
    "sync.noloco": "NoLoCo: pairs average whole models, or fragments, each at its moment.",
    "pipeline": "The model cut into stages on separate machines.",
    "adapter": "Adapters of model.init_from: they alone are trained, sent and averaged.",
    "admission": "Who may join.",
    "ensemble": "When the experts part, and how they answer together.",
    "experts": "Several models, each of a domain of its own; the first is the generalist.",
}


def of_codecs() -> str:
    """The size of each codec, and which ones need differences."""
    size = {name: f"{row.bytes_per_value:.1g}" for name, row in CODECS.items()}
    shown = {name: f"'{name}' {'<' * row.packs}{size[name]}" for name, row in CODECS.items()}
    everywhere = [shown[name] for name, row in CODECS.items() if not row.differences_only]
    coarse = [shown[name] for name, row in CODECS.items() if row.differences_only]
    ways = [way for way, row in WAYS.items() if row.sends_differences]
    return (
        f"Bytes a value: {', '.join(everywhere)}; with {', '.join(ways)} also {', '.join(coarse)}."
    )


def _told(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a section, and the words below it in its file."""
    for each in (cls for cls in reversed(section.__mro__) if issubclass(cls, Section)):
        (cls,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(cls, ast.ClassDef)
        for key, said in pairwise(cls.body):
            match key, said:
                case (
                    ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    yield prefix + name, " ".join(words.split())
    for name, field in section.model_fields.items():
        if inner := section_in(field.annotation):
            yield from _told(inner, f"{prefix}{name}.")


EXAMPLES: Final[Mapping[str, str]] = {
    "model.num_kv_heads": "2",
    "model.init_from": '"HuggingFaceTB/SmolLM2-135M"',
    "sync.gamma": "0.7",
    "data.chat_template": "\"{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}\"",
}
"""Values shown, commented out, for keys that have none."""
SET_BY_START: Final = frozenset(
    {
        "data.manifest",
        "data.tokenizer_digest",
        "data.document_end",
        "adapter.base",
        "admission.secret_digest",
        "experts.manifest",
        "experts.frozen",
        "frozen",
    }
)
OF_EXPERTS: Final = ("experts.model.", "experts.training.", "experts.frozen.")
"""Sections inside an expert: their keys are explained where the run's own stand."""
EXPLANATIONS: Final[Mapping[str, str]] = {
    **{
        path: said
        for path, said in _told(RunSpec)
        if path not in {*SET_BY_START, *SECTIONS, "frozen.config"}
        and not path.startswith(OF_EXPERTS)
    },
    "sync.codec": of_codecs(),
    "sync.diloco.fragments": "'strided' or 'sequential' blocks, or 'whole': plain DiLoCo.",
}


def _tuning(name: str, learning_rate: float, **more: Any) -> Mapping[str, Any]:
    optimizer = {"name": "adamw", "warmup_steps": 10, "weight_decay": 0.0}
    return {
        "name": name,
        "model": {"context_length": 1024},
        "data": {"source": "chat:data/*.jsonl", "validation_blocks": 16},
        "training": {"total_steps": 1000, "batch_size": 16},
        "sync": {"inner_steps": 25},
        "optimizer": {**optimizer, "learning_rate": learning_rate},
        **more,
    }


TUNING: Final[Mapping[str, Mapping[str, Any]]] = {
    "sft": _tuning("sft", 1e-5),
    "lora": _tuning("lora", 1e-4, adapter={}),
}
"""Keys of presets that go on from a checkpoint."""
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "demo": {
        "name": "demo",
        "optimizer": {"learning_rate": 2e-3},
        "training": {"total_steps": 1200, "batch_size": 8},
        "sync": {"inner_steps": 25},
    },
    "125m": {
        "name": "llama-125m",
        "model": {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_layers": 12,
            "num_heads": 12,
            "context_length": 1024,
        },
        "data": {"source": "text:data/*.txt", "tokenizer": "openai-community/gpt2"},
        "optimizer": {"learning_rate": 6e-4, "warmup_steps": 1000},
        "training": {"total_steps": 25_000, "batch_size": 64},
        "sync": {"inner_steps": 50},
    },
    "1b": {
        "name": "llama-1b",
        "model": {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_layers": 22,
            "num_heads": 32,
            "num_kv_heads": 8,
            "context_length": 2048,
        },
        "data": {"source": "text:data/*.txt", "tokenizer": "openai-community/gpt2"},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 1000},
        "training": {"total_steps": 25_000, "batch_size": 64},
        "sync": {"inner_steps": 100, "validate_every": 5},
    },
}
"""Keys that differ from the run spec's defaults, by preset."""
ALL_PRESETS: Final = {**PRESETS, **TUNING}
BRIEF: Final = frozenset({"demo"})
"""Presets of runs that are over before it pays to compile a model."""
UNTRIED: Final = frozenset({"125m", "1b"})
"""Presets with sizes and rates from the literature, which nobody has trained to the end."""

FIRST_KEYS: Final = (
    "name",
    "model.init_from",
    "data.source",
    "data.replay",
    "data.replay_share",
    "data.tokenizer",
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_layers",
    "model.num_heads",
    "model.context_length",
    "training.total_steps",
    "training.batch_size",
    "optimizer.learning_rate",
    "optimizer.muon.learning_rate",
    "sync.method",
    "sync.inner_steps",
    "pipeline.stages",
    "admission.mode",
)
"""Keys of the first screen."""
OF_CHECKPOINT: Final = frozenset(
    {
        "data.tokenizer",
        "model.family",
        "model.hidden_size",
        "model.intermediate_size",
        "model.num_heads",
        "model.num_kv_heads",
        "model.num_layers",
        "model.rope_theta",
        "model.tie_embeddings",
    }
)
"""Keys that a checkpoint says better."""
TUNING_LINES: Final = (
    "# Sizes, tokenizer and chat template are the checkpoint's. It has learnt at a falling rate,",
    "# and would forget at a high one: the rate is half of the usual (2e-5; 2e-4 of adapters), and",
    "# rises over 1% of the steps. AdamW, because most checkpoints were trained with it.",
)
EXTENDED: Final = "extended"
"""Stands for the preset of a run that goes on with another's model."""
EXTENDED_LINES: Final = (
    "# It goes on with a trained model, whose sizes and tokenizer it has. That model's rate had",
    "# fallen: so the peak is half of what it was, and is reached over 1% of the steps. Old texts",
    "# (data.replay) keep it from forgetting: a quarter of them gave back 0.54 of 0.57 nats.",
)
LINE: Final = (
    "# " + "-" * 76,
    "# Below stands the rest, which most runs keep as it is.",
    "",
)
SKIPPING: Final = (
    "# visited = stages skips nothing. With fewer an iteration takes less time and learns less:",
    "# four of six stages took 27 s for 56, and were 0.12 nats behind after as many steps. A model",
    "# of four stages, all visited, was better than both (docs/results/pipeline_learning.md).",
    "# A run that skips continues while a stage has no peer; one that does not skip waits.",
)
GENERALIST: Final = "general"
TEXTS_OF_ALL: Final = "text:data/*/*.txt"
"""The generalist's texts, where each expert has a folder of its own."""
BELOW_EXPERTS: Final = (
    "# Write what differs of [model] and [training]. All peers train the first until",
    "# ensemble.branch_round; then each trains the one that needs it most, or that its user names",
    "# (loco-peer join ... --expert NAME). Here the others have half as many steps together as the",
    "# first.",
)
MOST_COLUMNS: Final = 110
UNTRIED_LINE: Final = (
    "# Nobody has trained this preset to its end: its rates are those of the literature."
)
IN_FRAGMENTS: Final = "streaming"
"""The name of NoLoCo of fragments."""
METHODS: Final = (*WAYS, IN_FRAGMENTS)
OPTIMIZERS: Final = ("muon", "adamw")
MUON_RATE: Final = 4.0
"""Muon's rate over AdamW's (decision 0039)."""


def write_new(path: Path, spec: RunSpec, preset: str, *, force: bool) -> list[str]:
    """Write a run spec that was made of `preset`, and return what it takes of a peer, in lines.

    Raises ConfigError: the file is there already or cannot be written.
    """
    data = toml_of(spec, preset).encode()
    check_new(path, force=force)
    target = Path(os.path.realpath(path))  # a link stays, also one that leads to no file yet
    try:
        if not force:
            target.touch(exist_ok=False)  # one alone of two that are here at once gets the name
        try:
            replace_file(target, data)
        except BaseException:
            if not force:
                target.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return told_needs(spec, corpus_tokens_of(spec))


def check_new(path: Path, *, force: bool) -> None:
    """Raises ConfigError: the file is there already, is no file, or cannot be looked at."""
    try:
        if path.exists() and not force:
            raise ConfigError(f"{path} exists already; use --force to replace it")
        if path.exists() and not path.is_file():
            raise ConfigError(f"cannot write {path}: it is no file")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def check_source(data: str) -> None:
    """Raises ConfigError: there is no such kind of source."""
    if data.partition(":")[0] not in SOURCES:
        raise ConfigError(
            f"unknown data source '{data}': for text files write text:{data}; the others are"
            f" {', '.join(source for source in SOURCES if source != 'text')}"
        )


def preset_spec(
    preset: str = "demo",
    method: str = METHODS[0],
    optimizer: str | None = None,
    stages: int = 1,
    data: str | None = None,
    seed: int = 0,
    experts: Sequence[str] = (),
    model: str | None = None,
) -> RunSpec:
    """The run spec of a preset; `model` is the checkpoint that it goes on from.

    Peers choose how often they average, where the way lets them; holders of stages do not.

    Raises:
        ConfigError: a name is unknown, there are more stages than layers, or no checkpoint is named
            where one is needed.
        InvalidRunSpec: stages do not average by this method, or names of experts cannot be.
    """
    asked = {"method": method, "optimizer": optimizer or OPTIMIZERS[0], "preset": preset}
    for (kind, name), known in zip(asked.items(), (METHODS, OPTIMIZERS, ALL_PRESETS), strict=True):
        if name not in known:
            raise ConfigError(f"unknown {kind} '{name}': use {' or '.join(known)}")
    _check_tuning(preset, model, whole=stages == 1 and not experts)
    if data is not None:
        check_source(data)
    tree = ALL_PRESETS[preset]
    if preset in PRESETS and stages > (layers := validated(tree).model.num_layers):
        raise ConfigError(f"--stages {stages}: '{preset}' has {layers} layers, one for a stage")
    inner = {"name": OPTIMIZERS[0], **tree["optimizer"]}
    inner["name"] = optimizer or inner["name"]
    if inner["name"] == "muon":
        inner["muon"] = {"learning_rate": MUON_RATE * inner["learning_rate"]}
    sync = {**tree["sync"], "method": method}
    if method != IN_FRAGMENTS and WAYS[method].has_own_rounds and stages == 1:
        sync["inner_steps"] = "auto"
    pipeline = {} if stages == 1 else {"stages": stages, "visited": stages}
    source = TEXTS_OF_ALL if experts and data is None else data
    corpus = {**tree.get("data", {}), **({} if source is None else {"source": source})}
    own = {"sync": sync, "optimizer": inner, "pipeline": pipeline, "data": corpus, "seed": seed}
    whole = {**tree, **own}
    if stages == 1 and preset not in BRIEF:
        whole["training"] = {**tree["training"], "compile": "auto"}
    if model is not None:
        here = Path(model).expanduser()
        named = str(here.absolute()) if here.exists() else model
        whole["model"] = {**tree["model"], "init_from": named}
    spec = validated(whole)
    if experts:
        spec = validated(_with_experts(whole, experts, spec.total_rounds // 2))
    check_stages(spec)
    return spec


def _check_tuning(preset: str, model: str | None, *, whole: bool) -> None:
    if preset in TUNING and model is None:
        raise ConfigError(
            f"--preset {preset} needs --model, the checkpoint to go on from: a folder, or a name on"
            " the hub"
        )
    if preset not in TUNING and model is not None:
        raise ConfigError(f"--model is for --preset {' or '.join(TUNING)}")
    if preset in TUNING and not whole:
        raise ConfigError(f"--preset {preset} trains one whole model: no --stages and no --experts")


def _with_experts(tree: dict[str, Any], names: Sequence[str], branch_round: int) -> dict[str, Any]:
    steps = tree["training"]["total_steps"] // 2 // len(names)
    others = [
        {"name": name, "source": f"text:data/{name}/*.txt", "training": {"total_steps": steps}}
        for name in names
    ]
    apart = {"branch_round": branch_round}
    return {**tree, "experts": [{"name": GENERALIST}, *others], "ensemble": apart}


def toml_of(spec: RunSpec, preset: str) -> str:
    """The file's text, of which no key is missing."""
    chosen = dict(_keys(spec))
    if spec.model.init_from is not None:
        its_own = {*OF_CHECKPOINT, *(f"model.{key}" for key in OF_MIXTURES)}
        chosen = {path: value for path, value in chosen.items() if path not in its_own}
    first = {path: chosen.pop(path) for path in FIRST_KEYS if chosen.get(path) is not None}
    lines = [*_head(spec, preset), *(_beside(*entry) for entry in first.items()), "", *LINE]
    return "\n".join([*lines, *_rest(spec, chosen)]) + "\n"


def _head(spec: RunSpec, preset: str) -> list[str]:
    return [
        "# A run of loco-peer: what all its peers agree on. What is left out has its default.",
        "# What it takes of a peer:",
        *(f"#   {line}" for line in told_needs(spec, corpus_tokens_of(spec))),
        *[UNTRIED_LINE] * (preset in UNTRIED),
        *TUNING_LINES * (preset in TUNING),
        *EXTENDED_LINES * (preset == EXTENDED),
        "",
    ]


def _beside(path: str, value: Any) -> str:
    """A key, with its meaning on the same line where there is room."""
    return _explained(f"{path} = {_literal(value)}", EXPLANATIONS[path])


def _explained(line: str, meaning: str) -> str:
    whole = f"{line:<34}  # {meaning}"
    return whole if len(whole) <= MOST_COLUMNS else f"# {meaning}\n{line}"


def _rest(spec: RunSpec, keys: Mapping[str, Any]) -> Iterator[str]:
    section = ""
    for path, value in keys.items():
        of = path.rpartition(".")[0]
        if of != section:
            yield from ["", f"# [{of}] {SECTIONS[of]}"]
            section = of
        if path == "pipeline.visited":
            yield from SKIPPING
        yield f"# {EXPLANATIONS[path]}"
        shown = _literal(value) if value is not None else EXAMPLES[path]
        yield f"{'# ' * (value is None)}{path} = {shown}"
    if spec.pipeline.stages == 1:
        yield from ["", "# [pipeline] A model too large for one machine: loco-peer new --stages N."]
    if spec.experts:
        yield from ["", f"# [[experts]] {SECTIONS['experts']}", *BELOW_EXPERTS]
    for expert in spec.experts:
        yield from ["", "[[experts]]", *_of_expert(expert, spec)]


def _of_expert(expert: ExpertSection, spec: RunSpec) -> Iterator[str]:
    """The keys that an expert sets, and as comments those that it could."""
    written = {"name": _literal(expert.name)}
    if expert.source is not None:
        written |= {
            "source": _literal(expert.source),
            "training.total_steps": str(expert.training.total_steps),
            "# model.num_layers": str(spec.model.num_layers),
            "# begin": _literal(expert.begin),
        }
    for key, value in written.items():
        of = key.removeprefix("# ").partition(".")[0]
        yield _explained(f"{key} = {value}", EXPLANATIONS[f"experts.{of}"])


def _keys(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    inner: list[tuple[str, Section]] = []
    for name, value in section:
        path = prefix + name
        if isinstance(value, Section):
            inner.append((path, value))
        elif path not in SET_BY_START and not _is_idle(section, name):
            yield path, value
    for path, value in inner:
        yield from _keys(value, f"{path}.")


def _is_idle(section: Section, name: str) -> bool:
    """Whether a key says nothing beside the others, or is a section that stands elsewhere."""
    match section:
        case PipelineSection():
            return section.stages == 1
        case DataSection() if name == "chat_template":
            return section.chat_template is None and not section.source.startswith("chat:")
        case DataSection() if name == "replay":
            return section.replay is None
    in_it = section_in(type(section).model_fields[name].annotation)
    return in_it is not None or name in section.idle()


def _literal(value: Any) -> str:
    # JSON of such plain values is TOML, which knows no pairs of surrogates.
    return json.dumps(value, ensure_ascii=False)
