"""What all peers know of the sends of a run before it begins."""

from collections.abc import Callable
from dataclasses import dataclass


def never(_cycle: int) -> bool:
    """No cycle is the last."""
    return False


@dataclass(frozen=True, slots=True)
class SendPlan:
    """The sends of one group.

    Attributes:
        group: its digest.
        num_fragments: fragments of its model.
        is_last: whether a cycle is that of the sends after the run's last inner step.
    """

    group: str
    num_fragments: int
    is_last: Callable[[int], bool] = never

    def owners_key(self, fragment: int, cycle: int) -> str:
        """What the owners of a fragment's chunks are chosen by (protocol/fragment/owners.py)."""
        return f"{self.group}/{fragment}/{cycle}"

    def sends_at_once(self, cycle: int) -> int:
        """Fragments that are on their way together: all of them after the run's last step."""
        return self.num_fragments if self.is_last(cycle) else 1
