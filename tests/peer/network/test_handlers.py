"""What goes wrong on one stream ends that stream; a bug is told of, or not hidden."""

from typing import Any

import pytest
import trio

from peer.network.handlers import MAX_TOLD, Handlers
from protocol.errors import RemoteProtocolError


class ClosedStream:
    """A stream of some peer, of which nothing is read."""

    def __init__(self, remote_peer_id: str) -> None:
        self.remote_peer_id = remote_peer_id
        self.closed = False

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self.closed = True


def failing(*errors: Exception) -> Any:
    """A handler that raises these, one by one."""
    left = list(errors)

    async def handle(_: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise left.pop(0)

    return handle


async def serve(handlers: Handlers, peer_id: str = "stranger") -> ClosedStream:
    stream: Any = ClosedStream(peer_id)
    assert handlers.admit(peer_id)
    await handlers.run("p", stream)
    return stream


async def test_a_bug_ends_the_stream_is_counted_and_told_once_for_each_peer_and_kind():
    told: list[tuple[str, BaseException]] = []
    handlers = Handlers(lambda sentence, error: told.append((sentence, error)))
    handlers.add("p", failing(OverflowError("a"), OverflowError("b"), KeyError(), OverflowError()))
    for peer_id in ("one", "one", "one", "two"):
        assert (await serve(handlers, peer_id)).closed
    assert handlers.failed_streams == 4
    kinds = [(sentence.split()[3], type(error)) for sentence, error in told]
    assert kinds == [("one", OverflowError), ("one", KeyError), ("two", OverflowError)]


async def test_so_many_strangers_do_not_fill_the_log():
    told: list[str] = []
    handlers = Handlers(lambda sentence, _: told.append(sentence))
    handlers.add("p", failing(*[ValueError() for _ in range(MAX_TOLD + 5)]))
    for number in range(MAX_TOLD + 5):
        await serve(handlers, f"peer-{number}")
    assert len(told) == MAX_TOLD
    assert handlers.failed_streams == MAX_TOLD + 5


async def test_in_a_simulation_a_bug_is_not_hidden():
    handlers = Handlers()
    handlers.add("p", failing(OverflowError("seen"), RemoteProtocolError("theirs")))
    with pytest.raises(OverflowError, match="seen"):
        await serve(handlers)
    assert (await serve(handlers)).closed  # what a peer does wrong is no bug
    assert handlers.failed_streams == 0
