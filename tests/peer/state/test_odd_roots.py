"""A source that describes its state by a root that is none: its reader ends the talk, no more."""

import dataclasses
from pathlib import Path
from typing import Any

import msgpack
import pytest
from service_worlds import GROUP, P, empty_vectors, world
from trio.testing import MockClock

from peer.content.fetching import ExpectedState
from peer.content.gathering import whole_state
from peer.network import conversation
from protocol.errors import Refused, RemoteProtocolError
from protocol.wire.content_messages import StateReply
from protocol.wire.fields import Message
from protocol.wire.messages import encode_message


@pytest.mark.parametrize("digits", [31, 33, 63])
async def test_a_state_reply_with_a_root_of_33_digits_breaks_the_protocol(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: int
) -> None:
    told = []

    def lie(message: Message) -> bytes:
        header = encode_message(message)
        if not isinstance(message, StateReply):
            return header
        told.append(message)
        tree: dict[str, Any] = msgpack.unpackb(header)
        packed: bytes = msgpack.packb(tree | {"root": ("ab" * 32)[:digits]})
        return packed

    monkeypatch.setattr(conversation, "encode_message", lie)
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        with pytest.raises(RemoteProtocolError, match="StateReply: field 'root'"):
            await fetcher.description(ExpectedState(GROUP), P)
    assert told


async def test_a_root_that_is_not_that_of_the_chunks_breaks_it_too(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(message: Message) -> bytes:
        if isinstance(message, StateReply):
            message = dataclasses.replace(message, root="ab" * 17)
        return encode_message(message)

    monkeypatch.setattr(conversation, "encode_message", lie)
    async with world(tmp_path) as made, made.fetcher() as fetcher:
        with pytest.raises((RemoteProtocolError, Refused)):
            await whole_state(fetcher, ExpectedState(GROUP), *empty_vectors())
