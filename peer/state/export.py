"""The slow weights as a Hugging Face checkpoint.

The folder loads with `transformers.AutoModelForCausalLM.from_pretrained(folder)`: config.json,
model.safetensors (fp32), the tokenizer's files (the byte tokenizer as one of Hugging Face's), and
`loco_peer.json`, which marks the folder as an export and says where the weights come from. Files
are written beside the folder and moved in when all are whole.

An exported model continues texts with all of its stages or without some, whose layers are skipped
as microbatches skip them in training. The same prompt, sampling and stages give the same text, on
the same machine and versions.
"""

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TextStreamer
from transformers.utils import logging as transformers_logging

from peer.runtime.files import USUAL_FILE
from peer.training.adapter import merged, write_adapter
from peer.training.corpus.chats import end_of_answer
from peer.training.corpus.tokenizer import BYTES, ByteTokenizer, FileTokenizer, Tokenizer
from peer.training.model import adapted_checkpoint, model_config, model_shapes, trained_parameters
from protocol.content.samples import Float32Vector
from protocol.run.families import FAMILIES
from protocol.run.layout import Layout, stage_layers
from protocol.run.run_spec import RunSpec

from .ensemble_reader import Ensemble
from .export_folder import MARKER, WEIGHTS_FILE, check_export_folder, stages_of_export

ADAPTER: Final = "adapter"
"""Folder of an export, for peft."""
ALONE: Final = {"top": 1, "discount": 1.0, "fixed_share": 0.0}
"""The rules of an ensemble of one model."""
_EMBEDDING: Final = "model.embed_tokens.weight"


def export_hugging_face(
    phi_P: Float32Vector,
    spec: RunSpec,
    layout: Layout,
    out_dir: Path,
    *,
    tokenizer_json: bytes | None = None,
    round: int | None = None,
    tokens: int | None = None,
) -> None:
    """Write the slow weights `phi_P` (fp32 [P]) as a checkpoint into `out_dir`.

    Args:
        tokenizer_json: content of the run's tokenizer.json; None with the byte tokenizer.
        round, tokens: of the weights, for `loco_peer.json`.

    Raises:
        FileExistsError: `out_dir` holds something that is not an export.
        ValueError: vector, layout or tokenizer do not fit the run spec, or no base is here.
    """
    check_export_folder(out_dir)
    if (tokenizer_json is None) != (spec.data.tokenizer == BYTES):
        raise ValueError(f"the tokenizer given does not fit the run's, {spec.data.tokenizer!r}")
    tokenizer = ByteTokenizer() if tokenizer_json is None else FileTokenizer(tokenizer_json)
    end_of_text = tokenizer.end_of_text
    config = _config(spec, layout, tokenizer)
    if spec.data.chat_template is not None and isinstance(tokenizer, FileTokenizer):
        end = end_of_answer(spec.data.chat_template)
        if (token := tokenizer.vocabulary.get(end)) is not None:
            end_of_text, config.eos_token_id = end, token
    if phi_P.dtype != np.float32 or phi_P.shape != (layout.padded_parameters,):
        raise ValueError(
            f"weights of {phi_P.shape} do not fit {layout.padded_parameters} parameters"
        )
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        config.save_pretrained(partial)
        tensors = _tensors(phi_P, layout)
        if spec.adapter is not None:
            tensors = _with_base(tensors, spec, config.vocab_size, partial / ADAPTER)
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        tokenizer_json = tokenizer_json or ByteTokenizer().to_json()
        _write_tokenizer(partial, tokenizer_json, end_of_text, spec)
        origin = {
            "run": spec.name,
            "round": round,
            "tokens": tokens,
            "tokenizer": spec.data.tokenizer,
            "stages": spec.pipeline.stages,
        }
        (partial / MARKER).write_text(json.dumps(origin, indent=2) + "\n")
        move_files(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(spec: RunSpec, layout: Layout, tokenizer: Tokenizer) -> Any:
    """The model's config. Raises ValueError: its parameters do not lie as `layout` says."""
    embeddings = (entry.shape[0] for entry in layout.entries if entry.name == _EMBEDDING)
    vocabulary_size = next(embeddings, 1)
    if Layout.from_shapes(model_shapes(spec, vocabulary_size)).digest != layout.digest:
        raise ValueError("the layout is not that of the run spec's model")
    config = model_config(spec, vocabulary_size)
    config.architectures = [FAMILIES[config.model_type].architecture]
    config.dtype = torch.float32
    config.use_cache = True  # off in training, wanted for generating
    if spec.model.init_from is None:  # the family's own are tokens of another vocabulary
        config.bos_token_id = None
        config.eos_token_id = next(iter(tokenizer.separator), None)
    return config


def _tensors(phi_P: Float32Vector, layout: Layout) -> dict[str, torch.Tensor]:
    """Each parameter as a copy, as phi may be read-only memory that still moves."""
    return {
        entry.name: torch.from_numpy(
            phi_P[entry.offset : entry.offset + entry.size].reshape(entry.shape).copy()
        )
        for entry in layout.entries
    }


def _with_base(
    adapters: dict[str, torch.Tensor], spec: RunSpec, vocabulary_size: int, folder: Path
) -> dict[str, torch.Tensor]:
    """Write the adapters for peft, and return the whole model's parameters, with them added."""
    module = adapted_checkpoint(spec, vocabulary_size)
    for name, parameter in trained_parameters(module).items():
        parameter.data = adapters[name]
    write_adapter(folder, module, spec)
    return merged(module)


def _write_tokenizer(
    folder: Path, tokenizer_json: bytes, end_of_text: str | None, spec: RunSpec
) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(tokenizer_json)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        model_max_length=spec.model.context_length,
        clean_up_tokenization_spaces=False,
        eos_token=end_of_text,
        chat_template=spec.data.chat_template,
    )
    tokenizer.save_pretrained(folder)
    path.write_bytes(tokenizer_json)  # which that has written anew: its digest names the tokens


def move_files(source: Path, out_dir: Path) -> None:
    """Move every file of `source` into `out_dir`; the user's own files there stay."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            move_files(path, out_dir / path.name)
            continue
        path.chmod(USUAL_FILE)  # safetensors writes for the owner alone
        shutil.move(path, out_dir / path.name)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How much is written, and how each token is drawn.

    Attributes:
        tokens: to write at most; None: as many as are usual, and the model has room for.
        temperature: below LEAST_TEMPERATURE the likeliest token is always taken.
        top_p: tokens are drawn from the likeliest that together have this probability.
    """

    tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


class ExportedModel:
    """A model that `export_hugging_face` wrote. Raises ValueError: it did not; OSError.

    Attributes:
        stages: of the pipeline that trained it; 1 without one.
    """

    def __init__(self, folder: Path) -> None:
        self.stages = stages_of_export(folder)
        transformers_logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    @property
    def layers(self) -> int:
        return len(self._model.model.layers)

    def leave_out(self, stages: Collection[int]) -> None:
        """Take out the layers of all these relay stages; to be called once."""
        config = self._model.config
        gone = {
            layer
            for stage in stages
            for layer in stage_layers(config.num_hidden_layers, self.stages, stage)
        }
        kept = [layer for n, layer in enumerate(self._model.model.layers) if n not in gone]
        for number, layer in enumerate(kept):
            layer.self_attn.layer_idx = number
        self._model.model.layers = nn.ModuleList(kept)
        config.num_hidden_layers = len(kept)

    def continue_text(self, prompt: str, sampling: Sampling, write: Callable[[str], None]) -> None:
        continue_together(Ensemble([self._model], self._tokenizer, ALONE), prompt, sampling, write)


def continue_together(
    ensemble: Ensemble, prompt: str, sampling: Sampling, write: Callable[[str], None]
) -> None:
    """Write what follows the prompt, word by word, up to the end of the text.

    Raises ValueError: prompt and tokens do not fit the models.
    """
    writer: Any = _Writer(ensemble.tokenizer, write)
    for token in ensemble.continued(prompt, *astuple(sampling)):
        writer.put(torch.tensor([token]))
    writer.end()


class _Writer(TextStreamer):
    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)
