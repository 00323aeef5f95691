"""`loco-peer eval` in a swarm of real processes: the network's losses are those of one process."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from swarm import START_S, Swarm, open_swarm
from test_experts import LAYERS, STEPS_A_ROUND, join, spec_in

from peer.content.state_file import HEADER_BYTES
from peer.observe.event_names import EventName
from peer.training.corpus.folder import kept_corpus
from peer.training.model import FlatModel, empty_module
from protocol.experts.ensemble import RULES, ensemble_log_probs, loss_of

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Two experts, each trained to its end by one peer."""
    folder = tmp_path_factory.mktemp("evaluated")
    spec = spec_in(folder).replace("total_steps = 1000000", "total_steps = 60")
    spec = spec.replace(f"inner_steps = {STEPS_A_ROUND}", "inner_steps = 10")
    with open_swarm(folder, spec) as swarm:
        swarm.found()
        join(swarm, swarm.founder, "code1")
        for peer in swarm.members:
            peer.wait_event(EventName.RUN_FINISHED, START_S)
        yield swarm


def said_by(swarm: Swarm) -> np.ndarray:
    """What both experts say of both domains, computed here: [expert, domain, block, token]."""
    rows = []
    for number, peer in enumerate(swarm.members):
        signed, status = peer.home.run(), peer.ask("write_state")
        assert signed is not None
        models = signed.spec().models
        model = FlatModel(empty_module(models[number], 256), torch.device("cpu"))
        count, path = model.theta_P.numel(), status["path"]
        model.theta_P.copy_(torch.from_numpy(np.fromfile(path, "<f4", count, offset=HEADER_BYTES)))
        row = []
        for each in models:
            kept = kept_corpus(peer.home.cache_dir, each.data.manifest or "")
            assert kept is not None
            blocks_BT = kept.open().validation_blocks(each.data.validation_blocks)
            with torch.no_grad():
                row.append(model.log_probs(torch.from_numpy(blocks_BT)).numpy())
        rows.append(row)
    return np.array(rows)


@pytest.mark.long
def test_the_networks_losses_are_those_of_one_process_and_claims_can_be_checked(
    finished: Swarm,
) -> None:
    told = said_by(finished)
    for peer, option in zip(finished.members, ((), ("--check",)), strict=True):
        home = ("--home", str(peer.home.root))
        ran = finished.loco("eval", "--json", *home, *option, timeout_s=START_S)
        assert ran.returncode == 0, ran.stderr
        tree = json.loads(ran.stdout)
        assert [each["name"] for each in tree["experts"]] == list(LAYERS)
        for number, domain in enumerate(tree["domains"]):
            for expert, name in enumerate(LAYERS):
                ours = loss_of(told[expert, number])
                assert domain["alone"][name] == pytest.approx(ours, abs=1e-6)
            for rule, combination in RULES.items():
                ours = loss_of(ensemble_log_probs(told[:, number], combination))
                assert domain["together"][rule] == pytest.approx(ours, abs=1e-6)
            assert domain["best"] == list(LAYERS)[number]
        for each in tree["experts"]:
            is_own = each["peer"] == peer.peer_id
            assert each["believed"] is (True if is_own or option else None), each["check"]
        experts = peer.status()["matrix"]
        assert experts["together"] == pytest.approx(
            [domain["together"]["the run's"] for domain in tree["domains"]]
        )
    ran = finished.loco("status", "--home", str(finished.founder.home.root))
    assert "ensemble" in ran.stdout
    assert "*" in ran.stdout


@pytest.mark.long
def test_the_page_shows_every_expert_on_every_domain(finished: Swarm, browser: Any) -> None:
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(finished.founder.ready()["metrics"].removesuffix("metrics"))
    rows = page.locator("#matrix tr")
    rows.first.wait_for(timeout=1e3 * START_S)
    told = finished.founder.status()["matrix"]
    losses = [*told["losses"], told["together"]]
    shown = [[cell.inner_text() for cell in row.locator("td").all()] for row in rows.all()]
    assert [name for name, *_ in shown] == [*LAYERS, "ensemble"]
    for domain in range(len(LAYERS)):
        column = [row[domain] for row in losses]
        known = [loss for loss in column if loss is not None]
        assert [cells[1 + domain] for cells in shown] == [
            "-" if loss is None else f"{loss:,.4f}{'*' if loss == min(known) else ''}"
            for loss in column
        ]
    assert page.locator("#domains").inner_text().split() == [*LAYERS, "gain"]
    assert complaints == []
