"""How fast a run comes forward: nominal steps per second, of late.

The end of the run is a nominal step, and the swarm comes to it at the pace of its median peer, not
at ours. So what is left is told by how the nominal step has moved here over the last WINDOW_S: that
has quotas, pauses of the trainer and waits in it. A step that falls, or leaps further than anybody
trains, is another beginning: a state was taken, or the run was gone on with elsewhere.
"""

from collections import deque
from typing import Final

WINDOW_S: Final = 300.0
LEAST_S: Final = 5.0
"""Less than that says nothing yet."""
LARGEST_LEAP: Final = 10.0
"""Times what was trained in the whole window before."""
LEAST_LEAP_STEPS: Final = 100.0


class RunPace:
    """See the top of the file."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, float]]()

    def note(self, now_s: float, step: float) -> None:
        """The run is at this nominal step."""
        if self._seen and self._is_another_beginning(step):
            self._seen.clear()
        self._seen.append((now_s, step))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    def rest(self) -> None:
        """Nothing is trained now."""
        self._seen.clear()

    def steps_per_s(self) -> float | None:
        """Nominal steps per second; None before enough was seen."""
        if len(self._seen) < 2:
            return None
        (since_s, first), (now_s, last) = self._seen[0], self._seen[-1]
        if now_s - since_s < LEAST_S or last <= first:
            return None
        return (last - first) / (now_s - since_s)

    def left_s(self, total_steps: int) -> float | None:
        """Seconds to the end of the run at this pace; None where that is not known."""
        pace = self.steps_per_s()
        return None if pace is None else max(0.0, total_steps - self._seen[-1][1]) / pace

    def _is_another_beginning(self, step: float) -> bool:
        first, last = self._seen[0][1], self._seen[-1][1]
        return step < last or step - last > max(LEAST_LEAP_STEPS, LARGEST_LEAP * (last - first))
