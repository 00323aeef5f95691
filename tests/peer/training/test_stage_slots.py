"""Slots follow from what a microbatch holds, and daemon and trainer agree on their number."""

import pytest
import torch
from test_stages import Stage, run_spec

from peer.codec import BLOCK, get_codec
from peer.training import device
from peer.training.messages import TrainerSettings
from peer.training.pipe import SocketChannel
from peer.training.shared import (
    MAX_SLOTS,
    BoundaryRing,
    SharedVector,
    code_memory,
)
from peer.training.stages import build
from peer.training.stages.build import graph_bytes, slots_for
from protocol.run.needs import MIN_SLOTS, later_stage_memory


class SilentPipe(SocketChannel):
    def __init__(self):
        pass


def graph_of(held, stage):
    given = torch.zeros((2, 17), dtype=torch.int64) if stage == 0 else torch.zeros(2, 16, 32)
    return graph_bytes(held.compute, given, embeds=stage == 0)


def held_by(stage, *, checkpoints=False):
    held = Stage(run_spec(), stage)
    if checkpoints:
        held.model.recompute()
    found = graph_of(held, stage)
    assert not held.compute._held
    assert not held.model.gradient_P.any()
    return found, len(held.module.model.layers)


def test_a_graph_is_as_large_as_what_its_layers_keep():
    """Between ten and a hundred times a boundary for a layer of this shape, per layer."""
    boundary = 2 * 16 * 32 * 4
    for stage in (0, 1):
        held, layers = held_by(stage)
        assert 10 * layers * boundary < held < 100 * layers * boundary


def test_checkpoints_hold_less():
    whole, layers = held_by(1)
    less, _ = held_by(1, checkpoints=True)
    assert less == layers * 2 * 16 * 32 * 4 < whole / 10


@pytest.mark.parametrize(
    ("graph", "free", "slots", "fit"),
    [
        (100, 501, 5, True),
        (100, 200, MIN_SLOTS, True),
        (100, 150, MIN_SLOTS, False),
        (100, 1, MIN_SLOTS, False),
        (1, 10**9, MAX_SLOTS, True),
    ],
)
def test_as_many_as_fit(graph, free, slots, fit):
    assert slots_for(graph, free) == (slots, fit)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_layers_are_computed_again_where_the_least_does_not_fit(
    tmp_path, monkeypatch, forced, small
):
    """Only then, or where the user says so; and what is chosen is told."""
    spec = run_spec()
    monkeypatch.setattr(build, "activation_memory", lambda *_: 10**5 if small else 10**9)
    tokens = tmp_path / "tokens.u8"
    tokens.write_bytes(bytes(range(64)) * 200)
    layout = Stage(spec, 1).model.layout
    with SharedVector(layout.padded_parameters) as slow:
        settings = TrainerSettings(
            spec.to_bytes(), "me", str(tokens), 64, "cpu", stage=1, checkpoint_activations=forced
        )
        memory = slow.read_only_fd, code_memory()
        _, ready = build.build_stage(settings, memory, code_memory(), SilentPipe())
    assert len(ready.notes) == (small and not forced)
    assert all("computed again in the backward pass" in note for note in ready.notes)


def test_the_daemon_finds_as_many_slots_as_the_trainer_made():
    fd, codec = code_memory(), get_codec("int8")
    made = BoundaryRing(fd, codec, BLOCK, 12)
    made.slot(23)[:3] = b"abc"
    found = BoundaryRing(fd, codec, BLOCK)
    assert found.slots == 12
    assert bytes(found.slot(23)[:3]) == b"abc"


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("recomputes", [False, True])
def test_slots_leave_room_for_what_the_trainer_takes_later(monkeypatch, stage, recomputes):
    held, spec, cpu = Stage(run_spec(), stage), run_spec(), torch.device("cpu")
    if recomputes:
        held.model.recompute()
    needed = later_stage_memory(spec, stage, on_gpu=False) + 4 * 3 * graph_of(held, stage)
    for more, slots in ((0, 3), (-4, 2)):
        monkeypatch.setattr(device, "free_memory", lambda _, more=more: needed + more)
        assert build.measured_slots(held.compute, spec, cpu, stage) == (slots, True)
