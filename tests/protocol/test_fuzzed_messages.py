"""Messages drawn from the wire schema: what may be said comes through, all else is their fault."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fuzzing.headers import KINDS, check, with_damage
from bench.fuzzing.values import longest_record
from protocol.limits import MAX_HEADER_BYTES
from protocol.wire.messages import TYPES, decode_message, encode_message

EXAMPLES = 10
"""Of each type; `python -m bench.fuzz` tries many more."""
of_every_type = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def test_every_type_is_drawn() -> None:
    assert set(KINDS) == set(TYPES.values())


@of_every_type
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_what_may_be_said_comes_through_and_what_is_damaged_is_refused(kind, data):
    check(*data.draw(with_damage(kind)))


@of_every_type
def test_the_longest_message_fits_one_header(kind):
    message = longest_record(kind)
    header = encode_message(message)
    assert len(header) <= MAX_HEADER_BYTES
    assert decode_message(header) == message
