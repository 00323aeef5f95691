"""Messages between daemon and trainer: there and back, and nothing else."""

import contextlib
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.runtime.child_frames import FrameDecoder, PipeError, encode
from peer.training import pipe
from peer.training.messages import (
    Begin,
    Evaluated,
    Load,
    ModelCreated,
    Ready,
    RoundClosed,
    Stop,
    TrainerCommand,
    TrainerEvent,
    TrainerProgress,
    TrainerSettings,
    TrainRound,
)
from protocol.limits import MAX_CONTROL_PAYLOAD_BYTES
from protocol.microbatch.trainer_messages import (
    Begun,
    Filled,
)
from protocol.trainer_messages import FragmentMerged, FragmentSent, Merge
from protocol.wire.stage_messages import Direction

MESSAGES: list[Any] = [
    Load(),
    TrainRound(7, 50, (("a", 4), ("b", 2)), 1, 99, 362.5, 1.25),
    TrainerProgress(7, 3, 2.5, 0.001, 0.5, 0.25, 353.0),
    FragmentMerged(2, 7, 0.25),
    Evaluated(7, 2.5, 0.25),
    Ready("cpu", "fp32", 8, 11.5, (("a", (2, 3)),)),
    Begin("train", TrainerSettings(b"{}", "a", "/c", 256), 2),
    ModelCreated((("a", (2, 3)), ("b", ())), (("a", (2, 3)), ("b", ()), ("c", (4,))), "{}"),
    Filled(Direction.BACKWARD, 3, 1, 2.5),
    Filled(Direction.FORWARD, 3, 9, None),
    Begun(4),
    RoundClosed(3, 5, 40, 2.5, 0, 40, 1.5, 200.0),
    FragmentSent(2, 7, 5, 40, "ab", 0.25, 362.5),
    Merge(2, 7, (0, 1), (3,)),
    Merge(2, None, (), (1,), (0,)),
    Stop(),
]


ALL = msgspec.msgpack.Decoder(Begin | TrainerCommand | TrainerEvent | ModelCreated)


def _frame(tree):
    body = msgpack.packb(tree)
    return len(body).to_bytes(4, "big") + body


@given(st.integers(1, 50))
def test_messages_survive_in_pieces(size):
    data = b"".join(encode(message) for message in MESSAGES)
    frames = FrameDecoder(ALL)
    received: list[object] = []
    for start in range(0, len(data), size):
        received += frames.feed(data[start : start + size])
    assert received == MESSAGES


@pytest.mark.parametrize(
    "tree",
    [
        {"kind": "Nonsense"},
        {"kind": "CloseRound"},
        {"kind": "CloseRound", "round": 1, "more": 2},
        {"kind": "CloseRound", "round": True},
        {"kind": "CloseRound", "round": "1"},
        {"kind": "CloseRound", "round": None},
        {"kind": "Merge", "fragment": 0, "cycle": 0, "stepped": [None], "moved": []},
        {"kind": "ModelCreated", "shapes": [["a"]], "config": "{}"},
        {"kind": ["Load"]},
        [1, 2],
        7,
    ],
)
def test_anything_else_is_refused(tree):
    with pytest.raises(PipeError):
        list(FrameDecoder(ALL).feed(_frame(tree)))


def test_a_frame_over_the_bound_is_refused_before_it_is_read():
    with pytest.raises(PipeError, match="allowed"):
        list(FrameDecoder(ALL).feed((MAX_CONTROL_PAYLOAD_BYTES + 1).to_bytes(4, "big")))
    with pytest.raises(PipeError, match="allowed"):
        encode(Load("x" * MAX_CONTROL_PAYLOAD_BYTES))


@pytest.mark.parametrize("message", MESSAGES)
def test_each_end_takes_what_the_other_says_and_nothing_else(message):
    taken = 0
    for decoder in (pipe.TO_TRAINER, pipe.FROM_TRAINER):
        with contextlib.suppress(PipeError):
            taken += list(FrameDecoder(decoder).feed(encode(message))) == [message]
    assert taken == (2 if isinstance(message, Filled) else 1)  # slots are filled at both ends


@given(st.binary(max_size=200))
def test_garbage_never_gets_through(data):
    try:
        messages = list(FrameDecoder(ALL).feed(data))
    except PipeError:
        return
    assert all(encode(message) in data for message in messages)
