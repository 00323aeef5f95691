"""What goes wrong on one stream ends that stream; a bug is told of, or not hidden."""

from typing import Any

import pytest
import trio
import trio.testing

from peer.network.handlers import MAX_TOLD, BaseNetwork
from protocol.errors import RemoteProtocolError
from protocol.limits import INBOUND_STREAMS


class ClosedStream:
    """A stream of some peer, of which nothing is read."""

    def __init__(self, remote_peer_id: str) -> None:
        self.remote_peer_id = remote_peer_id
        self.remote_address = ""
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


async def serve(network: BaseNetwork, peer_id: str = "stranger") -> ClosedStream:
    stream: Any = ClosedStream(peer_id)
    assert network.has_room("p", peer_id, "")
    await network.run("p", stream)
    return stream


async def test_a_bug_ends_the_stream_is_counted_and_told_once_for_each_peer_and_kind():
    told: list[tuple[str, BaseException]] = []
    also: list[tuple[str, BaseException]] = []
    network = BaseNetwork()
    network.tellers.append(lambda peer_id, _, error: told.append((peer_id, error)))
    network.tellers.append(lambda peer_id, _, error: also.append((peer_id, error)))
    await network.serve(
        "p", failing(OverflowError("a"), OverflowError("b"), KeyError(), OverflowError())
    )
    for peer_id in ("one", "one", "one", "two"):
        assert (await serve(network, peer_id)).closed
    assert network.carried.failed_streams == 4
    kinds = [(peer_id, type(error)) for peer_id, error in told]
    assert kinds == [("one", OverflowError), ("one", KeyError), ("two", OverflowError)]
    assert also == told


async def test_so_many_strangers_do_not_fill_the_log_nor_silence_another_bug():
    told: list[str] = []
    network = BaseNetwork()
    network.tellers.append(lambda peer_id, _, error: told.append(type(error).__name__))
    many = 300
    await network.serve("p", failing(*[ValueError() for _ in range(many)], OverflowError()))
    for number in range(many + 1):
        await serve(network, f"peer-{number}")
    assert told == ["ValueError"] * MAX_TOLD + ["OverflowError"]
    assert network.carried.failed_streams == many + 1


async def test_in_a_simulation_a_bug_is_not_hidden():
    network = BaseNetwork()
    await network.serve("p", failing(OverflowError("seen"), RemoteProtocolError("theirs")))
    with pytest.raises(OverflowError, match="seen"):
        await serve(network)
    assert (await serve(network)).closed  # what a peer does wrong is no bug
    assert network.carried.failed_streams == 0


async def test_streams_of_one_network_are_bounded_and_those_of_a_private_one_are_not():
    network = BaseNetwork()
    ended = trio.Event()
    await network.serve("p", lambda _: ended.wait())
    many = INBOUND_STREAMS.per_prefix + 1
    async with trio.open_nursery() as nursery:
        for where, expected in (("5.6.7.8", many - 1), ("192.168.1.2", many)):
            admitted = 0
            for number in range(many):
                stream: Any = ClosedStream(f"{where} {number}")
                stream.remote_address = f"/ip4/{where}/tcp/1"
                if network.has_room("p", stream.remote_peer_id, stream.remote_address):
                    admitted += 1
                    nursery.start_soon(network.run, "p", stream)
                    await trio.testing.wait_all_tasks_blocked()
            assert admitted == expected
        assert network.carried.refused_streams == 1
        ended.set()
