"""What is counted of microbatches, in status and metrics by these names."""

from enum import StrEnum


class Counted(StrEnum):
    """What has happened to a microbatch here."""

    BEGUN = "begun"
    """It set out (at its data peer)."""
    DONE = "done"
    """Its gradient has been added here."""
    WITHOUT = "without"
    """It is done, and had set out while a stage had nobody, which got no gradient of it (at its
    data peer)."""
    AGAIN = "again"
    """It was lost on its way to the loss, and set out again (at its data peer)."""
    MENDED = "mended"
    """It was lost on its way back, and others did again what was gone (at its data peer)."""
    REPLAYED = "replayed"
    """Its gradient has been added here in the place of a relay that was gone (at a relay)."""
    GONE = "gone"
    """A stage's gradient of it was gone before it moved any weight: its relay died (at its data
    peer, once for each such stage), or its trainer did (at the relay)."""
    LOST = "lost"
    """It set out or was held here, and its gradient will not come."""
    LATE = "late"
    """Its gradient came when it was not held any more (at a relay)."""
    BUSY = "busy"
    """It was sent away, for too many wait (at a relay)."""
    REFUSED = "refused"
    """What came of it here was no boundary, or of a size that cannot be right, and was refused."""
    CLIPPED = "clipped"
    """Its gradient was far longer than usual, and counted less in the step here."""
    SCORED = "scored"
    """It passed for validation alone (at a relay)."""
