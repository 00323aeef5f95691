"""What is sent to other peers of a fragment exchange."""

import gc
from types import SimpleNamespace
from typing import Any

import trio
from owner_worlds import FRAGMENT, GROUP, IDS, contribution, outer_copy
from pipe_streams import pipe

from peer.averaging.diloco.fragment_messages import Outbox
from peer.averaging.diloco.outer_fragments import SpareMemory
from peer.network.conversation import Conversation
from protocol.wire.fragment_messages import NoResult


async def test_what_was_sent_is_let_go_while_its_stream_lasts():
    ours, theirs = pipe(*IDS[:2])

    async def open_stream(*_: Any) -> Any:
        return ours

    network: Any = SimpleNamespace(open_stream=open_stream)
    message, codes = contribution(outer_copy("int8"), {0: 1.0, 1: 2.0})
    spare = SpareMemory(1 << 20)
    lent = spare.take(len(codes))
    lent[:] = codes
    async with trio.open_nursery() as nursery:
        outbox, there = Outbox(network, nursery.start_soon), Conversation(theirs)
        outbox.send_soon(IDS[1], message, lent)
        outbox.send_soon(IDS[1], NoResult(GROUP, FRAGMENT, 7))
        del lent
        for expected in (type(message), NoResult):
            with trio.fail_after(1):
                await there.receive(expected, max_payload_bytes=len(codes))
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        assert spare.spare_bytes == len(codes)
        outbox.keep_only(())
