"""A pipeline of real processes trains what the whole model trains in one process.

One data peer and a relay for each further stage; no stage has a partner, paths go through the
stages in order, the outer step is neutral (plain, fp32, waited for), and nothing is clipped. Each
step's loss is compared with that of one model that is trained here on the same blocks.
"""

from collections.abc import Iterator

import pytest
import torch
from swarm import START_S, Peer, Swarm, open_swarm

from peer.observe.event_names import EventName
from peer.training.corpus.folder import open_corpus
from peer.training.model import FlatModel, empty_module, model_config
from peer.training.optimizer import inner_optimizer
from peer.training.stages.module import initial_stage
from peer.training.step import Stepper
from protocol.run.run_spec import RunSpec, parse_toml
from protocol.schedule.data_plan import DataPlan

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]

STAGES = 3
STEPS = 10
VOCABULARY = 256
SAME = 1e-5
"""Nats per token."""
SPEC = """
name = "exact"

[model]
hidden_size = 64
intermediate_size = 128
num_layers = 3
num_heads = 4
context_length = 32

[data]
validation_blocks = 2

[optimizer]
learning_rate = 1e-3
schedule = "constant"
warmup_steps = 0
clip_norm = 1e6

[training]
total_steps = 10
batch_size = 6
micro_batch = 2
precision = "fp32"

[sync]
inner_steps = 1
overlap = false
codec = "fp32"
alpha = 0.0
beta = 1.0

[pipeline]
stages = 3
visited = 3
codec = "fp32"
"""


@pytest.fixture
def swarm(tmp_path) -> Iterator[Swarm]:
    with open_swarm(tmp_path) as swarm:
        yield swarm


def test_it_trains_what_the_whole_model_trains(swarm: Swarm) -> None:
    swarm.folder("run.toml").write_text(SPEC)
    data_peer = swarm.launch("founder0", "start", str(swarm.folder("run.toml")))
    for stage in range(1, STAGES):
        swarm.join(data_peer, f"relay{stage}", environment=_holding(swarm, stage))
    data_peer.wait_event(EventName.RUN_FINISHED, START_S)
    closed = [event for event in data_peer.events(EventName.ROUND_CLOSED) if event["steps"]]
    assert [event["steps"] for event in closed] == [1] * STEPS
    theirs = [event["loss"] for event in closed]
    counts = data_peer.status()["microbatches"]
    assert (counts["begun"], counts["done"], counts["lost"]) == (30, 30, 0)

    spec = parse_toml(SPEC)
    ours = _losses_here(spec, _first_weights(spec), data_peer)
    assert theirs == pytest.approx(ours, abs=SAME)


def _holding(swarm: Swarm, stage: int) -> dict[str, str]:
    return swarm.environment | {"LOCO_STAGE": str(stage)}


def _first_weights(spec: RunSpec) -> torch.nn.Module:
    """The whole model, as the first holders of its stages begin."""
    config = model_config(spec, VOCABULARY)
    stages = [initial_stage(config, spec.seed, stage, STAGES) for stage in range(STAGES)]
    named = {name: p.detach() for stage in stages for name, p in stage.named_parameters()}
    module: torch.nn.Module = empty_module(spec, VOCABULARY)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(named[name])
    return module


def _losses_here(spec: RunSpec, module: torch.nn.Module, data_peer: Peer) -> list[float]:
    """Train the whole model on the data peer's blocks. Returns its losses."""
    model = FlatModel(module, torch.device("cpu"))
    (path,) = data_peer.home.cache_dir.glob("corpus-*")
    corpus = open_corpus(path, spec.model.context_length, spec.data.validation_blocks)
    batch_size = spec.training.batch_size
    plan = DataPlan(spec.seed, corpus.num_blocks, corpus.piece_blocks)
    taken = plan.take(0, 0, STEPS * batch_size, data_peer.peer_id, [(data_peer.peer_id, 1)])
    stepper = Stepper(model, inner_optimizer(model, spec.optimizer, "fp32"), "fp32", 2)
    return [
        float(stepper.step(corpus.blocks(blocks), spec.optimizer.learning_rate).loss)
        for blocks in taken.blocks.reshape(STEPS, batch_size)
    ]
