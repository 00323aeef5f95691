"""What a set of machines would do together: replicas, a full pipeline and SkipPipe side by side.

All ways train the same microbatches, so their iterations compare; what a skipped stage costs in
learning does not show here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .changes import Help, what_helps
from .effort import effort_for
from .first_answer import replicas_of
from .pipelines import Pipeline, full_pipeline, skipping_pipeline
from .problem import US_PER_S
from .question import Question, check
from .replicas import Estimate
from .ways_of_working import by_way_of_working


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that `loco-peer plan` tells.

    Attributes:
        estimates: by way: noloco, diloco, full, skippipe.
        ways_of_working: seconds of an iteration of full and skippipe, by way of working.
        help: changes that would shorten SkipPipe's iteration.
    """

    estimates: Mapping[str, Estimate]
    full: Pipeline
    skippipe: Pipeline
    ways_of_working: Mapping[str, Mapping[str, float | None]]
    help: Help

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        chosen, ways = self.skippipe, self.estimates
        bound_us = chosen.lower_bound_us
        return {
            **chosen.planned.plan.to_json(chosen.problem),
            "iteration_s": {way: each.iteration_s for way, each in ways.items()},
            "lower_bound_s": None if bound_us is None else bound_us / US_PER_S,
            "tokens_per_s": {way: each.tokens_per_s for way, each in ways.items()},
            "cost_per_billion_tokens": {
                way: each.cost_per_billion_tokens for way, each in ways.items()
            },
            "fits": {way: each.fits for way, each in ways.items()},
            "bytes_per_hour": {way: each.bytes_per_hour for way, each in ways.items()},
            "utilisation": {way: each.utilisation for way, each in ways.items()},
            "unskipped": self._unskipped(),
            "ways_of_working": {way: dict(each) for way, each in self.ways_of_working.items()},
            "bottleneck": chosen.bottleneck.sentence,
            "help": [{"change": each.change, "iteration": each.share} for each in self.help.gains],
            "help_noise": self.help.noise,
            "plan": chosen.planned.plan.digest(chosen.problem),
        }

    def _unskipped(self) -> dict[str, Any] | None:
        """The iterations of SkipPipe that skip nothing; None where there are no such."""
        if len(self.skippipe.iterations) == 1:
            return None
        usual, whole = self.skippipe.iterations
        plan = whole.planned.plan
        return {
            "every": usual.times + whole.times,
            "iteration_s": whole.planned.makespan_us / US_PER_S,
            "paths": plan.to_json(whole.problem)["paths"],
            "plan": plan.digest(whole.problem),
        }


def what_if(question: Question) -> Answer:
    """Plan, price and compare.

    Raises:
        CannotPlan
    """
    check(question)
    skippipe = skipping_pipeline(question)
    same = replace(question, microbatches=skippipe.problem.microbatches)
    skips = skippipe.problem.visited < question.stages
    full = full_pipeline(same) if skips else skippipe
    estimates = {**replicas_of(same), "full": full.estimate, "skippipe": skippipe.estimate}
    judging = effort_for(len(question.offers), question.budget).judging
    working = {
        "full": by_way_of_working(full.iterations, judging),
        "skippipe": by_way_of_working(skippipe.iterations, judging),
    }
    return Answer(estimates, full, skippipe, working, what_helps(same, skippipe))
