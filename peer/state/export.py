"""The slow weights as a Hugging Face checkpoint.

The folder loads with `transformers.AutoModelForCausalLM.from_pretrained(folder)`: config.json,
model.safetensors (fp32), the tokenizer's files (the byte tokenizer as one of Hugging Face's), and
`loco_peer.json`, which says where the weights come from and marks the folder as an export. Files
are written beside the folder and moved in when all are whole.
"""

import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedTokenizerFast

from peer.ports.files import USUAL_FILE
from peer.training.corpus.tokenizer import BYTES, ByteTokenizer, FileTokenizer, Tokenizer
from peer.training.model import model_config, model_shapes
from protocol.run.layout import Layout, LayoutEntry
from protocol.run.run_spec import RunSpec

from .export_folder import MARKER, check_export_folder

Float32Vector = npt.NDArray[np.float32]

_WEIGHTS: Final = "model.safetensors"
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
        layout: where each parameter lies in `phi_P`.
        tokenizer_json: content of the run's tokenizer.json; None with the byte tokenizer.
        round, tokens: where the weights stand, written into `loco_peer.json`.

    Raises:
        FileExistsError: `out_dir` holds something that is not an export.
        ValueError: the vector or the layout does not fit the run spec.
    """
    check_export_folder(out_dir)
    if (tokenizer_json is None) != (spec.data.tokenizer == BYTES):
        raise ValueError(f"the tokenizer given does not fit the run's, {spec.data.tokenizer!r}")
    tokenizer = ByteTokenizer() if tokenizer_json is None else FileTokenizer(tokenizer_json)
    config = _config(spec, layout, tokenizer)
    if phi_P.dtype != np.float32 or phi_P.shape != (layout.padded_parameters,):
        raise ValueError(
            f"weights of {phi_P.shape} do not fit {layout.padded_parameters} parameters"
        )
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        config.save_pretrained(partial)
        save_file(_tensors(phi_P, layout), partial / _WEIGHTS, metadata={"format": "pt"})
        tokenizer_json = tokenizer_json or ByteTokenizer().to_json()
        _write_tokenizer(partial, tokenizer_json, tokenizer.end_of_text, spec)
        origin = {
            "run": spec.name,
            "round": round,
            "tokens": tokens,
            "tokenizer": spec.data.tokenizer,
            "stages": spec.pipeline.stages,
        }
        (partial / MARKER).write_text(json.dumps(origin, indent=2) + "\n")
        _move_files(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(spec: RunSpec, layout: Layout, tokenizer: Tokenizer) -> LlamaConfig:
    """The model's config, once it is sure that its parameters lie as `layout` says."""
    vocabulary_size = _entry(layout, _EMBEDDING).shape[0]
    if Layout.from_shapes(model_shapes(spec, vocabulary_size)).digest != layout.digest:
        raise ValueError("the layout is not that of the run spec's model")
    config = model_config(spec, vocabulary_size)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.float32
    config.use_cache = True  # off in training, wanted for generating
    if spec.model.init_from is None:  # Llama's own are tokens of another vocabulary
        config.bos_token_id = None
        config.eos_token_id = next(iter(tokenizer.separator), None)
    return config


def _entry(layout: Layout, name: str) -> LayoutEntry:
    for entry in layout.entries:
        if entry.name == name:
            return entry
    raise ValueError(f"the layout has no {name}: not a model of the Llama family")


def _tensors(phi_P: Float32Vector, layout: Layout) -> dict[str, torch.Tensor]:
    """Each parameter as its own tensor; a copy, as phi may be read-only memory that still moves."""
    return {
        entry.name: torch.from_numpy(
            phi_P[entry.offset : entry.offset + entry.size].reshape(entry.shape).copy()
        )
        for entry in layout.entries
    }


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
    )
    tokenizer.save_pretrained(folder)


def _move_files(source: Path, out_dir: Path) -> None:
    """Move every file of `source` into `out_dir`; files of the user's own in there stay."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        path.chmod(USUAL_FILE)  # safetensors writes for the owner alone
        path.replace(out_dir / path.name)
