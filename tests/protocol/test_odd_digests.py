"""A digest whose hex digits are an odd number is refused where it is read, in every message."""

from collections.abc import Iterable, Iterator
from typing import Final, get_args

import pytest
from test_messages import EXAMPLES, changed

from protocol.errors import RemoteProtocolError
from protocol.wire.fields import Digest, Maybe, fields_of
from protocol.wire.messages import GetParts, Message, StateReply, decode_message

CHECKER: Final = get_args(Digest)[1]


def digests_in(messages: Iterable[Message]) -> Iterator[tuple[Message, str]]:
    """Each field of each message that holds a digest in hex."""
    for message in messages:
        kind: type = type(message)
        for field in fields_of(kind):
            checker = field.checker
            if (checker.inner if isinstance(checker, Maybe) else checker) == CHECKER:
                yield message, field.name


@pytest.mark.parametrize(("message", "field"), [*digests_in(EXAMPLES)], ids=repr)
@pytest.mark.parametrize("digits", [31, 33, 63])
def test_a_digest_or_root_of_33_digits_is_refused(
    message: Message, field: str, digits: int
) -> None:
    """It is short enough, and no bytes: taken for a digest it would be a ValueError later."""
    odd = ("ab" * 32)[:digits]
    with pytest.raises(RemoteProtocolError, match=f"{type(message).__name__}.*'{field}'"):
        decode_message(changed(message, **{field: odd}))


def test_roots_of_states_are_among_them() -> None:
    wanted = {(StateReply, "root"), (GetParts, "content")}
    assert {(type(message), field) for message, field in digests_in(EXAMPLES)} >= wanted
