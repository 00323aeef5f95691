"""What the core of the exchange orders to be done with the outer copy, in a worker thread."""

from protocol.diloco.fragment_events import (
    StampsAdopted,
    StampsAnswered,
    UndoSteps,
    Verified,
    Verify,
    WriteChunk,
    WriteResults,
    Written,
)
from protocol.errors import RemoteProtocolError

from .outer_fragments import OuterFragments

WriteOrder = Verify | WriteResults | WriteChunk | UndoSteps


def carry_out(outer: OuterFragments, order: WriteOrder) -> Verified | Written:
    """Do it; returned is what the core is to be told."""
    match order:
        case Verify(fragment, cycles):
            return Verified(fragment, outer.verify(fragment, cycles))
        case WriteResults(fragment, results):
            plausible = [result for result in results if outer.is_plausible(fragment, result)]
            written = {result.chunk: outer.write(fragment, result) for result in plausible}
            return Written(fragment, written)
        case WriteChunk(fragment, chunk, cycle, stamp, values):
            try:
                outer.heal(fragment, chunk, cycle, stamp, values)
            except RemoteProtocolError:
                return Written(fragment, {})  # not what its stamp says: another peer will have it
            return Written(fragment, {chunk: stamp})
        case UndoSteps(fragment, stamps):
            for chunk in stamps:
                outer.undo(fragment, chunk)
            return Written(fragment, stamps)


def not_begun(order: WriteOrder) -> Written:
    """The time was up before; what has no time is never up."""
    return Written(order.fragment, {})


def adoptable(outer: OuterFragments, answer: StampsAnswered) -> StampsAdopted:
    """The stamps of another peer that are those of the values that we have."""
    fragment = answer.fragment
    return StampsAdopted(
        fragment,
        {
            theirs.chunk: (cycle, theirs.stamp)
            for theirs, cycle in answer.states
            if outer.fits(fragment, theirs.chunk, cycle, theirs.stamp)
        },
    )
