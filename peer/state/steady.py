"""A minimum rate for what one peer sends us: below it, it is left and another one is asked.

A stall limit does not suffice: a peer that sends a byte now and then never stalls, and would hold
us for days. So within each window of time so many bytes have to come, or all of what was asked.
What the rate has to be follows from what is fetched: it is to be here within MAX_TRANSFER_S.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

from peer.network.conversation import Conversation, StreamStalled
from protocol.limits import MAX_TRANSFER_S, MIN_FETCH_BYTES_PER_S

RATE_WINDOW_S: Final = 60.0


def slowest_rate(total_bytes: int) -> float:
    """The least bytes per second at which so much may come."""
    return max(MIN_FETCH_BYTES_PER_S, total_bytes / MAX_TRANSFER_S)


@contextmanager
def steady(
    talk: Conversation, bytes_per_s: float, sharers: Callable[[], int] = lambda: 1
) -> Iterator[Callable[[int], None]]:
    """Yields what is to be called as bytes come (`on_progress` of a receive).

    Args:
        sharers: how many send at once, over what may be one line: each owes its part.

    Raises:
        StreamStalled: fewer than so many bytes a second came within a window.
    """
    due_bytes, seen_bytes = bytes_per_s * RATE_WINDOW_S, talk.bytes_received
    with trio.CancelScope(deadline=trio.current_time() + RATE_WINDOW_S) as scope:

        def moved(_: int) -> None:
            nonlocal seen_bytes
            if talk.bytes_received - seen_bytes >= due_bytes / sharers():
                seen_bytes = talk.bytes_received
                scope.deadline = trio.current_time() + RATE_WINDOW_S

        yield moved
    if scope.cancelled_caught:
        raise StreamStalled(
            f"{talk.remote_peer_id} sent less than {bytes_per_s:.0f} bytes a second"
            f" for {RATE_WINDOW_S:.0f} s"
        )
