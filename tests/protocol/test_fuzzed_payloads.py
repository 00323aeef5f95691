"""What travels inside payloads and signatures, damaged by a liar that signs it itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fuzzing.payloads import KINDS, check_payload, damaged_payloads

EXAMPLES = 20
of_every_kind = pytest.mark.parametrize("name", KINDS)


@of_every_kind
def test_what_is_whole_is_taken(name):
    tree, sealed, _ = KINDS[name]()
    assert check_payload(name, sealed(tree))


@of_every_kind
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_what_is_damaged_raises_nothing_unexpected(name, data):
    check_payload(name, data.draw(damaged_payloads(name)))
