"""A digest whose hex digits are an odd number is refused where it is read, in every message."""

from collections.abc import Iterable, Iterator
from typing import Final

import pytest
from msgspec import inspect
from test_messages import EXAMPLES, changed

from protocol.errors import RemoteProtocolError
from protocol.wire.content_messages import GetParts, StateScalars
from protocol.wire.fields import Digest, Message
from protocol.wire.messages import decode_message

DIGEST: Final = inspect.type_info(Digest)


def digests_in(messages: Iterable[Message]) -> Iterator[tuple[Message, str]]:
    """Each field of each message that holds a digest in hex."""
    for message in messages:
        info = inspect.type_info(type(message))
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            kinds = field.type.types if isinstance(field.type, inspect.UnionType) else [field.type]
            if DIGEST in kinds:
                yield message, field.name


@pytest.mark.parametrize(("message", "field"), [*digests_in(EXAMPLES)], ids=repr)
@pytest.mark.parametrize("digits", [31, 33, 63])
def test_a_digest_or_root_of_33_digits_is_refused(
    message: Message, field: str, digits: int
) -> None:
    """It is short enough, and no bytes: taken for a digest it would be a ValueError later."""
    odd = ("ab" * 32)[:digits]
    with pytest.raises(RemoteProtocolError, match=rf"{type(message).__name__}.*\$\.{field}`"):
        decode_message(changed(message, **{field: odd}))


def test_roots_of_states_are_among_them() -> None:
    wanted = {(StateScalars, "layout_digest"), (GetParts, "content")}
    assert {(type(message), field) for message, field in digests_in(EXAMPLES)} >= wanted
