"""The name of the run that follows: what a statement of it says, and which of two counts."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.address.peer_id import peer_id_from_public_key
from protocol.admission.statements import Successor, is_successor, seal
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_ADDRESS_CHARS, MAX_STATEMENT_BYTES

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
SIGNER = KEY.public_key().public_bytes_raw()
RUN, NEXT = "ab" * 16, "cd" * 16
ADDRESS = f"/ip4/203.0.113.5/tcp/31337/p2p/{peer_id_from_public_key(SIGNER)}"


def named(version: int = 1, successor: str = NEXT, address: str = ADDRESS) -> Successor:
    return Successor.made(RUN, version, successor, address, SIGNER, KEY.sign)


def test_what_was_named_is_read_again() -> None:
    made = named()
    assert is_successor(made.sealed)
    assert Successor.read(made.sealed, RUN) == made
    assert (made.run_id, made.address, made.signer) == (NEXT, ADDRESS, SIGNER)


def test_the_longest_address_has_room() -> None:
    host = "/dns4/" + ".".join(["h" * 58] * 3)
    address = f"{host}/tcp/31337/p2p/{peer_id_from_public_key(SIGNER)}"
    assert len(address) > MAX_ADDRESS_CHARS - 20
    assert len(named(2**53 - 1, address=address).sealed) <= MAX_STATEMENT_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        ["successor", NEXT, 1, RUN, ADDRESS, SIGNER],  # of another run
        ["successor", RUN, 1, RUN, ADDRESS, SIGNER],  # it would follow itself
        ["successor", RUN, 0, NEXT, ADDRESS, SIGNER],
        ["successor", RUN, 1, "../../" + NEXT[6:], ADDRESS, SIGNER],
        ["successor", RUN, 1, NEXT, "/ip4/203.0.113.5/tcp/31337", SIGNER],  # anybody there
        ["successor", RUN, 1, NEXT, "203.0.113.5:31337", SIGNER],
        ["successor", RUN, 1, NEXT, ADDRESS.replace("203.0.113.5", "203.0 113.5"), SIGNER],
        ["successor", RUN, 1, NEXT, ADDRESS, SIGNER[1:]],
        ["successor", RUN, 1, NEXT, ADDRESS],
        ["ruling", RUN, 1, NEXT, ADDRESS, SIGNER],
    ],
)
def test_what_names_no_other_run_and_no_peer_of_it_is_refused(fields: list[object]) -> None:
    with pytest.raises(RemoteProtocolError):
        Successor.read(seal(fields, KEY.sign), RUN)


def test_nobody_signs_in_anothers_name() -> None:
    other = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
    with pytest.raises(RemoteProtocolError, match="signature"):
        Successor.made(RUN, 1, NEXT, ADDRESS, SIGNER, other.sign)


def test_the_later_version_counts_in_whatever_order_they_come() -> None:
    first, second = named(1), named(2, "ef" * 16)
    assert first.comes_after(None)
    assert second.comes_after(first)
    assert not first.comes_after(second)
    twins = named(1), named(1, "ef" * 16)  # of a founder that has lost its home
    assert twins[0].comes_after(twins[1]) != twins[1].comes_after(twins[0])
