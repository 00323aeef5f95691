"""What `export` and `generate` of a run with experts get from the daemon of their home."""

from pathlib import Path

import numpy as np
import pytest
from swarm_worlds import simulated
from test_admission_requests import requests
from test_expert_swarm import experts_spec, start_all

from peer.daemon.sources import in_order
from protocol.errors import LocoError
from protocol.membership.view import View
from simulation.swarm import open_swarm

pytestmark = pytest.mark.slow

PARTS = ["expert/0", "expert/1"]


@simulated()
async def test_the_weights_of_another_expert_come_from_one_of_its_peers(tmp_path: Path) -> None:
    async with open_swarm(4, experts_spec(40, code_rounds=40), tmp_path) as swarm:
        await start_all(swarm)
        await swarm.until(lambda: min(swarm[name].facts.round for name in "bd") >= 3)
        held, asked = swarm["b"].facts.held, requests(swarm["a"])
        assert held is not None
        wanted = {"part": "expert/1", "padded_parameters": held.shape.padded_parameters}
        told = await asked.fetch_weights(wanted)
        weights = np.fromfile(told["path"], "<f4")
        assert weights.size == held.shape.padded_parameters
        assert weights.any()
        assert told["round"] >= 1
        assert told["tokens"] > 0
        with pytest.raises(LocoError, match="no peer that we see holds expert 2"):
            await asked.fetch_weights(wanted | {"part": "expert/2"})


@simulated()
async def test_a_text_is_scored_by_one_peer_of_each_expert(tmp_path: Path) -> None:
    async with open_swarm(5, experts_spec(40, code_rounds=40), tmp_path) as swarm:
        await start_all(swarm)
        await swarm.until(lambda: min(swarm[name].facts.round for name in "abcd") >= 2)
        wanted = {"parts": [*PARTS, "expert/2"], "tokens": [1, 2, 3, 4]}
        told = await requests(swarm["a"]).score_text(wanted)
        assert told["failed"] == {"expert/2": "no peer that we see holds expert 2"}
        assert told["log_probs"].keys() == set(PARTS)
        for said in told["log_probs"].values():
            assert len(said) == 3
            assert max(said) < 0


@simulated()
async def test_another_peer_of_the_expert_answers_where_the_first_cannot(tmp_path: Path) -> None:
    async with open_swarm(6, experts_spec(40, code_rounds=40), tmp_path) as swarm:
        await start_all(swarm)
        await swarm.until(lambda: min(swarm[name].facts.round for name in "abcd") >= 2)
        held = swarm["b"].facts.held
        assert held is not None
        view = View(swarm["a"].roster, held.group.digest)
        first = in_order(view, swarm["a"].peer_id, None)[0]
        swarm.kill(next(name for name in "bd" if swarm[name].peer_id == first))
        told = await requests(swarm["a"]).score_text({"parts": PARTS, "tokens": [1, 2, 3]})
        assert told["log_probs"].keys() == set(PARTS)
