"""What is wrong at a peer, in words."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong now.

    Attributes:
        name: stable; metrics and alerts go by it.
        words: one sentence, with the figures.
        help: page and section of the documentation.
    """

    name: str
    words: str
    help: str


def problems_of() -> tuple[Problem, ...]:
    return ()
