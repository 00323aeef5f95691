"""Experts of one run as one model: what they say together.

This file lies beside ensemble.json in an export of loco-peer, and needs torch and transformers
alone; the folder beside it is the run's experts, each a usual Hugging Face checkpoint.

    python ensemble.py --prompt "def main"        continues a text
    python ensemble.py --loss book.txt            nats per token of a text

    from ensemble import ExpertEnsemble
    print(ExpertEnsemble("export").loss("some text"))

Before each token an expert j has a weight w_j, in logarithms: how likely the text so far is of its
domain. The best `top` of them say together p = sum_j w_j p_j. When the token is known, all learn:
w_j <- log((1 - a) softmax(discount * w_j + log p_j) + a / E), with a the fixed share.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

USUAL_TOKENS = 200
LEAST_TEMPERATURE = 1e-3
"""Below it the likeliest token is all but certain, and quotients overflow."""


class Ensemble:
    """Models that say together what comes next.

    Args:
        rules: `top`, `discount` and `fixed_share` (see the top of the file).
    """

    def __init__(self, models: Sequence[Any], tokenizer: Any, rules: dict[str, Any]) -> None:
        self.models, self.tokenizer, self.rules = list(models), tokenizer, rules

    # --- the rule -----------------------------------------------------------------------------
    def even(self) -> torch.Tensor:
        """The weights before the first token: in logarithms, an expert each."""
        count = len(self.models)
        return torch.full((count,), 1 / count, dtype=torch.float64).log()

    def best(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights of those that weigh in, by expert first; -inf for the others."""
        if self.rules["top"] >= len(weights):
            return weights
        order = torch.argsort(weights, dim=0, descending=True, stable=True)
        rank = torch.argsort(order, dim=0)
        kept: torch.Tensor = weights.masked_fill(rank >= self.rules["top"], -torch.inf)
        return kept.log_softmax(0)

    def learned(self, weights: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """The weights after a token of which each expert said so much."""
        discount, share = float(self.rules["discount"]), float(self.rules["fixed_share"])
        now = (discount * weights + log_probs).log_softmax(0)
        return ((1 - share) * now.exp() + share / len(now)).log() if share else now

    # --- what it says of a text -----------------------------------------------------------------
    @property
    def context_length(self) -> int:
        return min(int(model.config.max_position_embeddings) for model in self.models)

    @torch.no_grad()
    def log_probs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of each token after the first: [experts, tokens - 1]."""
        tokens_1T = torch.tensor([list(tokens)])
        return torch.cat([true_log_probs(model, tokens_1T) for model in self.models])

    def together(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ensemble, by those of each of its experts."""
        weights, said = self.even(), []
        for now in log_probs.unbind(1):
            said.append((self.best(weights) + now).logsumexp(0))
            weights = self.learned(weights, now)
        return torch.stack(said)

    def loss(self, text: str) -> float:
        """Nats per token of a text, in blocks that the models can read at once."""
        tokens = self.tokenizer(text, add_special_tokens=False).input_ids
        return self.loss_of_tokens(tokens)

    def loss_of_tokens(self, tokens: Sequence[int]) -> float:
        """Each block is a text of its own, and begins with the last token of the one before."""
        if len(tokens) < 2:
            raise ValueError("the text has less than two tokens: there is nothing to foretell")
        length = self.context_length
        starts = range(0, len(tokens) - 1, length)
        blocks = [tokens[at : at + length + 1] for at in starts]
        said = torch.cat([self.together(self.log_probs(block)) for block in blocks])
        return -float(said.mean())

    # --- what it writes -------------------------------------------------------------------------
    @torch.no_grad()
    def continued(
        self,
        prompt: str,
        tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[int]:
        """The tokens that follow the prompt, up to the end of the text or so many.

        Raises ValueError: prompt and tokens do not fit the models.
        """
        given = self.tokenizer(prompt, add_special_tokens=False).input_ids
        count = room_for(tokens, len(given), self.context_length)
        draws = torch.Generator().manual_seed(seed)
        caches: list[Any] = [None] * len(self.models)
        weights, fresh = self.even(), given
        end = self.models[0].generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        if len(self.models) > 1 and len(given) > 1:  # else the prompt tells nobody apart
            for now in self.log_probs(given).unbind(1):
                weights = self.learned(weights, now)
        for _ in range(count):
            said = []
            for number, model in enumerate(self.models):
                cache = {"past_key_values": caches[number], "use_cache": True}
                out = model(torch.tensor([fresh]), logits_to_keep=1, **cache)
                caches[number] = out.past_key_values
                said.append(out.logits[0, -1].double().log_softmax(-1))
            each = torch.stack(said)
            token = _drawn(
                (self.best(weights)[:, None] + each).logsumexp(0), temperature, top_p, draws
            )
            if token in ends:
                return
            yield token
            weights, fresh = self.learned(weights, each[:, token]), [token]


class ExpertEnsemble(Ensemble):
    """The experts of a folder with an ensemble.json; `names` takes some of them alone.

    Raises ValueError: the folder holds no ensemble, or it is not whole; OSError.
    """

    def __init__(self, folder: str | Path, names: Sequence[str] | None = None) -> None:
        self.folder = Path(folder)
        path = self.folder / "ensemble.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} has no ensemble.json: it is no export of experts")
        told = json.loads(path.read_text(encoding="utf-8"))
        answering = [each for each in told["experts"] if each["answers"]]
        experts = [each for each in answering if names is None or each["name"] in names]
        if not experts:
            listed = ", ".join(each["name"] for each in answering)
            raise ValueError(f"{self.folder} has no such expert that answers, but: {listed}")
        self.names: list[str] = [each["name"] for each in experts]
        for each in experts:
            self._check(each)
        logging.disable_progress_bar()
        tokenizer: Any = AutoTokenizer.from_pretrained(self.folder / self.names[0])
        models: list[Any] = [
            AutoModelForCausalLM.from_pretrained(self.folder / name).float().eval()
            for name in self.names
        ]
        super().__init__(models, tokenizer, told["rules"])
        sizes = {model.config.vocab_size for model in self.models}
        if len(sizes) > 1:
            raise ValueError(f"the vocabularies of the experts differ: {sorted(sizes)} tokens")

    def _check(self, expert: dict[str, Any]) -> None:
        folder = self.folder / expert["name"]
        if not folder.is_dir():
            raise ValueError(f"{folder} is missing: export the run again, or copy the whole folder")
        for name, digest in expert["sha256"].items():
            if not (folder / name).is_file():
                raise ValueError(f"{folder / name} is missing: copy the whole folder")
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise ValueError(f"{folder / name} is not the file that was exported")
        own, first = (
            (self.folder / name / "tokenizer.json").read_bytes()
            for name in (expert["name"], self.names[0])
        )
        if own != first:
            raise ValueError(
                f"the tokenizers of {expert['name']} and {self.names[0]} differ:"
                " an ensemble compares what its experts say of the same tokens"
            )


def room_for(wanted: int | None, of_prompt: int, context: int) -> int:
    """How many tokens to write. Raises ValueError: they do not fit what a model reads at once."""
    room = context - of_prompt
    if not of_prompt:
        raise ValueError("the prompt is empty: give the text that is to be continued")
    if room < (wanted or 1):
        raise ValueError(
            f"the prompt has {of_prompt} tokens and {wanted or 1} shall follow, but the model"
            f" reads {context} at once: shorten the prompt, or lower --tokens"
        )
    return min(room, USUAL_TOKENS) if wanted is None else wanted


@torch.no_grad()
def true_log_probs(model: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of each token after the first of each block: [B, T - 1], float64."""
    logits: torch.Tensor = model(tokens_BT[:, :-1], use_cache=False).logits.double()
    return logits.log_softmax(-1).gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)


def _drawn(
    log_probs: torch.Tensor, temperature: float, top_p: float, draws: torch.Generator
) -> int:
    if temperature < LEAST_TEMPERATURE:
        return int(log_probs.argmax())
    found, order = (log_probs / temperature).softmax(-1).sort(descending=True)
    found[found.cumsum(0) - found >= top_p] = 0
    return int(order[torch.multinomial(found, 1, generator=draws)])


def main() -> None:
    parser = argparse.ArgumentParser(description="The experts of this folder as one model.")
    parser.add_argument("--prompt", help="text to continue")
    parser.add_argument("--loss", type=Path, metavar="FILE", help="a text to foretell")
    parser.add_argument("--tokens", type=int, help=f"to write; up to {USUAL_TOKENS} if left out")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    ensemble = ExpertEnsemble(given.folder)
    if given.loss is not None:
        print(f"{ensemble.loss(given.loss.read_text(encoding='utf-8')):.6f}")
    if given.prompt is not None:
        streamer: Any = TextStreamer(ensemble.tokenizer, skip_special_tokens=True)
        for token in ensemble.continued(
            given.prompt, given.tokens, given.temperature, seed=given.seed
        ):
            streamer.put(torch.tensor([token]))
        streamer.end()


if __name__ == "__main__":
    main()
