"""Statements of admission under a liar's own signature: rulings and passes, right and damaged."""

from collections.abc import Sequence
from typing import Any, Final

from hypothesis import strategies as st

from peer.network.identity import Identity
from protocol.admission.statements import Token, Verdict, seal

from .headers import anything, near_values
from .shots import drawn

COUNT: Final = 40


def statements_by(
    identity: Identity, run_id: str, peer_ids: Sequence[str], number: int
) -> tuple[bytes, ...]:
    """Sealed by this identity: its signature is right, whatever it says."""
    signer = identity.public_key
    token = Token.made(run_id, 2_000_000_000, 1, seed=bytes(32), signer=signer, sign=identity.sign)
    plain: list[list[Any]] = [
        *(["ruling", run_id, str(v), who, 1, signer] for v in Verdict for who in peer_ids),
        ["pass", token.invitation.sealed, identity.peer_id],
        ["invitation", run_id, signer, signer, 2_000_000_000, 1],
    ]

    def damaged(said: list[Any], place: int, value: Any) -> list[Any]:
        place %= len(said)
        return [*said[:place], value, *said[place + 1 :]]

    near = [value for said in plain[0] for value in near_values(said)]
    values = st.one_of(anything(), st.sampled_from(near))
    lies = st.builds(damaged, st.sampled_from(plain), st.integers(0, 5), values)
    told: list[list[Any]] = [*plain, *drawn(lies, COUNT, number)]
    return (*(seal(said, identity.sign) for said in told), token.pass_for(identity.peer_id).sealed)
