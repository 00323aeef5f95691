"""All that peers have signed of a run, each statement kept where it belongs."""

from protocol.admission.register import Mode, Register
from protocol.admission.statements import Successor, is_successor
from protocol.errors import RemoteProtocolError

from .amendments import AmendedSpec, Amendment, is_amendment


def take(
    statement: bytes, register: Register, amended: AmendedSpec, before: Successor | None = None
) -> Amendment | Successor | bool:
    """Keep a statement if it is new, and say what it is; False where it is not, or is refused.

    A successor is the caller's to keep; `before` is the one that it has.

    Raises RemoteProtocolError: it is no statement of this run.
    """
    if register.knows(statement) or (before is not None and statement == before.sealed):
        return False
    if is_successor(statement):
        named = Successor.read(statement, register.run_id)
        if not register.is_founder(named.signer):
            raise RemoteProtocolError("a successor that the founder has not named")
        return named if named.comes_after(before) else False
    if not is_amendment(statement):
        return register.take(statement)
    amendment = amended.take(statement)
    if amendment is None:
        return False
    register.mode = Mode(amended.last.admission.mode)
    return amendment
