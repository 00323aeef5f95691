"""Which 4-bit code for outer gradients: e3m0 or int4, at equal bytes, with and without feedback.

Relative L2 errors, |read - true| / |true|, on the outer gradients of a real run
(`bench/quality/outer_gradients.py`: the project's model, M = 4 replicas of DiLoCo, H = 30):

    one         of one replica's Delta in one round (mean over replicas and rounds), and its cosine
    mean        of the mean over the replicas, which is what the outer step sees
    sum         of the sum of those means over all rounds, which is where the weights end up

`feedback` is beta of error feedback (`bench.quality.error_feedback.py`); with 0 there is none.
With feedback what one round reads holds older errors too, so `one` and `mean` rise, and `sum`
falls: its error is that of the last round alone. Errors that are independent between replicas halve
in a mean of four, and so does what the replicas' Deltas do not have in common.

Tails decide between the two (`peer/codec/four_bit.py`). The notes say how far the largest value of
a block lies above the root mean square of the block, here and for spreads of known tails, and in
which tensors the errors arise.

    python -m bench.outer_codes [--full] [--seeds 0,1] [--json FILE]
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import platformdirs
import torch

from bench import report
from bench.quality.error_feedback import ErrorFeedback
from bench.quality.measures import mean, standard_error
from bench.quality.outer_gradients import outer_gradients
from bench.quality.settings import Setting
from bench.quality.tails import Tails
from bench.quality.world import World
from peer.codec import BLOCK, Codec, get_codec
from peer.training.model import model_shapes
from protocol.run.layout import Layout

CODES: Final = ("e3m0", "int4", "int8")
BETAS: Final = (0.0, 0.95, 1.0)
SHORT: Final = Setting("outer-codes-short", 150, 4, 30, 15, 30, final_blocks=16, replicas=4)
FULL: Final = replace(SHORT, name="outer-codes", steps=600, batch_size=8, warmup_steps=60)


class Sender:
    """One code and one beta: what the replicas send, and how far it is from the truth."""

    def __init__(self, codec: Codec, beta: float) -> None:
        self._codec, self._beta = codec, beta
        self._feedbacks: list[ErrorFeedback] = []
        self._errors: defaultdict[str, list[float]] = defaultdict(list)
        self._read_sum = self._true_sum = torch.zeros(())

    def take(self, deltas_MP: torch.Tensor) -> None:
        """One round."""
        if not self._feedbacks:
            values = deltas_MP.shape[1]
            self._feedbacks = [ErrorFeedback(self._codec, values, self._beta) for _ in deltas_MP]
        read_MP = torch.stack(
            [
                self._read(feedback, delta_P)
                for feedback, delta_P in zip(self._feedbacks, deltas_MP, strict=True)
            ]
        )
        for read_P, true_P in zip(read_MP, deltas_MP, strict=True):
            self._errors["one"].append(relative_error(read_P, true_P))
            self._errors["cosine"].append(cosine(read_P, true_P))
        self._errors["mean"].append(relative_error(read_MP.mean(0), deltas_MP.mean(0)))
        self._read_sum = self._read_sum + read_MP.mean(0).double()
        self._true_sum = self._true_sum + deltas_MP.mean(0).double()

    def found(self) -> dict[str, float]:
        """Mean errors so far."""
        means = {name: mean(errors) for name, errors in self._errors.items()}
        return means | {"sum": relative_error(self._read_sum, self._true_sum)}

    def _read(self, feedback: ErrorFeedback, delta_P: torch.Tensor) -> torch.Tensor:
        codes = torch.empty(self._codec.code_bytes(delta_P.numel()), dtype=torch.uint8)
        read_P = delta_P.clone()
        feedback.encode(read_P, codes)
        self._codec.decode(codes, read_P)
        return read_P


def relative_error(read_P: torch.Tensor, true_P: torch.Tensor) -> float:
    return float((read_P - true_P).norm() / true_P.norm())


def cosine(read_P: torch.Tensor, true_P: torch.Tensor) -> float:
    return float(torch.dot(read_P, true_P) / (read_P.norm() * true_P.norm()))


def measure(rounds: Iterable[torch.Tensor], tails: Tails) -> dict[tuple[str, float], Sender]:
    """All codes and betas on the same outer gradients."""
    senders = {(name, beta): Sender(get_codec(name), beta) for name in CODES for beta in BETAS}
    for deltas_MP in rounds:
        tails.take(deltas_MP)
        for sender in senders.values():
            sender.take(deltas_MP)
    return senders


def rows(found: Mapping[tuple[str, float], Sequence[Mapping[str, float]]]) -> list[report.Row]:
    """One row per code and beta: means over the seeds."""
    return [
        {
            "code": name,
            "bits": 8 * get_codec(name).code_bytes(BLOCK) / BLOCK,
            "feedback": beta,
            "one": mean([seed["one"] for seed in seeds]),
            "cosine": mean([seed["cosine"] for seed in seeds]),
            "mean": mean([seed["mean"] for seed in seeds]),
            "sum": mean([seed["sum"] for seed in seeds]),
            "sum, standard error": standard_error([seed["sum"] for seed in seeds]),
        }
        for (name, beta), seeds in found.items()
    ]


def goals(entries: Sequence[report.Row]) -> list[report.Goal]:
    """Feedback takes most of a 4-bit code's error out of the sum."""
    sums = {(row["code"], row["feedback"]): row["sum"] for row in entries}
    return [
        report.Goal(
            f"{name}: error of the sum with feedback over without",
            sums[name, 1.0] / sums[name, 0.0],
            at_most=0.5,
        )
        for name in ("e3m0", "int4")
    ]


def main() -> None:
    arguments = _options().parse_args()
    setting = FULL if arguments.full else SHORT
    found: defaultdict[tuple[str, float], list[dict[str, float]]] = defaultdict(list)
    notes: list[str] = []
    for seed in arguments.seeds or ([0, 1, 2] if arguments.full else [0]):
        world = World.open(setting, seed, arguments.cache)
        tails = Tails(Layout.from_shapes(model_shapes(world.spec, world.vocabulary)).entries)
        for key, sender in measure(outer_gradients(world), tails).items():
            found[key].append(sender.found())
        notes = notes or tails.notes()
    result = report.Report("outer_codes", "Relative errors of codes of outer gradients")
    result.settings = asdict(setting)
    result.rows, result.notes = rows(found), notes
    result.goals = goals(result.rows)
    result.publish(arguments.json)


def _options() -> argparse.ArgumentParser:
    parser = report.options(__doc__)
    parser.add_argument("--seeds", type=_seeds, metavar="A,B", help="of the runs")
    cache = Path(platformdirs.user_cache_dir("loco-peer"))
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="for the corpus")
    return parser


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


if __name__ == "__main__":
    main()
