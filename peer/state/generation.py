"""Text from an exported model, with all of its stages or without some.

A stage that is left out takes its layers with it: what comes out of the stage before goes into the
stage after, as where microbatches skip in training. The rest of the model, and its numbers of
layers for the cache of keys and values, close ranks.

The same prompt, sampling and stages give the same text, on the same machine and versions.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextStreamer,
)
from transformers.utils import logging as transformers_logging

from protocol.run.layout import stage_layers

from .export_folder import MARKER

USUAL_TOKENS: Final = 200
LEAST_TEMPERATURE: Final = 1e-3
"""Below it the likeliest token is all but certain, and the quotients overflow."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How much is written, and how each token is drawn.

    Attributes:
        tokens: to write at most; None: as many as the model has room for, and USUAL_TOKENS at most.
        temperature: below LEAST_TEMPERATURE the likeliest token is taken always.
        top_p: the likeliest tokens that together have this probability are drawn from.
    """

    tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


class ExportedModel:
    """A model in a folder that `export` wrote.

    Attributes:
        stages: into which it was cut in training; 1 is none.

    Raises:
        ValueError: the folder is no such export.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / MARKER).is_file():
            raise ValueError(f"{folder} is not an export: 'loco-peer export --hf DIR' makes one")
        self.stages: int = json.loads((folder / MARKER).read_text()).get("stages", 1)
        transformers_logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    @property
    def layers(self) -> int:
        """Layers that a token goes through."""
        return len(self._model.model.layers)

    def leave_out(self, stages: Collection[int]) -> None:
        """Take the layers of these relay stages out; once for all of them."""
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
        """Write what follows the prompt, word by word; it ends where a text of the run would.

        Raises:
            ValueError: prompt and tokens do not fit the model; the message says what would.
        """
        tokens_1T = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        count = self._room_for(tokens_1T.shape[1], sampling.tokens)
        end = self._model.generation_config.eos_token_id
        is_drawn = sampling.temperature >= LEAST_TEMPERATURE
        draws = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        settings = GenerationConfig(
            max_new_tokens=count,
            eos_token_id=end,
            pad_token_id=0 if end is None else None,
            do_sample=is_drawn,
            **(draws if is_drawn else {}),
        )
        streamer: Any = _Writer(self._tokenizer, write)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sampling.seed)
            self._model.generate(
                tokens_1T,
                attention_mask=torch.ones_like(tokens_1T),
                generation_config=settings,
                streamer=streamer,
            )

    def _room_for(self, of_prompt: int, wanted: int | None) -> int:
        context = self._model.config.max_position_embeddings
        room = context - of_prompt
        if not of_prompt:
            raise ValueError("the prompt is empty: give the text that is to be continued")
        if room < (wanted or 1):
            raise ValueError(
                f"the prompt has {of_prompt} tokens and {wanted or 1} shall follow, but the model"
                f" reads {context} at once: shorten the prompt, or lower --tokens"
            )
        return min(room, USUAL_TOKENS) if wanted is None else wanted


class _Writer(TextStreamer):
    """Hands on what is written as soon as a word is whole."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)
