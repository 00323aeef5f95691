"""What all peers know of the sends of a run before it begins."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SendPlan:
    """The sends of one group.

    Attributes:
        group: its digest.
        num_fragments: fragments of its model.
        last_cycle: that of the sends after the run's last inner step; None when there is none.
    """

    group: str
    num_fragments: int
    last_cycle: int | None = None

    def sends_at_once(self, cycle: int) -> int:
        """Fragments that are on their way together: all of them after the run's last step."""
        return self.num_fragments if cycle == self.last_cycle else 1
