"""Lines that the links of a machine share: one out, one in.

Idea: every line is a server that takes boundaries in the order in which they come to it, each for
as long as its bytes need at the line's rate. A boundary passes up to three: the sender's line out,
the link, the receiver's line in. It is not stored on the way (cut-through): with all three free it
takes as long as the slowest of them, which is what `Problem.transfer_us` says.

    out     taken when the work at the sender has ended; what stands first in it, and waits for its
            link, keeps the others waiting
    in      taken when the first byte is there; the event simulator has an event for that moment, so
            those of all senders are in order

Source: ours; SkipPipe's model has none of it.
"""

from .problem import Problem


class Lines:
    """When the lines of one iteration are free again.

    Attributes:
        have_inward: whether a boundary must pass the receiver's line (`arrive`).
    """

    def __init__(self, problem: Problem) -> None:
        number = len(problem.peers)
        self._out_us = [problem.line_us(rate) for rate in problem.out_bytes_per_s or ()]
        self._out_free = [0] * number
        self._in_us = [problem.line_us(rate) for rate in problem.in_bytes_per_s or ()]
        self._in_free = [0] * number
        self.have_inward = bool(self._in_us)

    def leave(self, source: int, ready_us: int) -> int:
        """Take the line out for a boundary whose link is free then; when its first byte leaves."""
        if not self._out_us:
            return ready_us
        leaves = max(ready_us, self._out_free[source])
        self._out_free[source] = leaves + self._out_us[source]
        return leaves

    def arrive(self, destination: int, transfer_us: int, first_us: int) -> int:
        """Take the line in, the first byte being there; the moment at which the last one is."""
        starts = max(first_us, self._in_free[destination])
        self._in_free[destination] = ends = starts + self._in_us[destination]
        return max(first_us + transfer_us, ends)
