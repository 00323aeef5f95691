"""What is kept of a domain's measure, and what is not."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from peer.facts import Facts
from peer.observe.events import EventLog
from peer.rounds.domains import HeldOutBlocks, MeasuredDomains
from peer.rounds.validation import Validation
from peer.training.messages import Evaluated

BLOCKS = HeldOutBlocks(1, "code", "ab" * 16, np.zeros((1, 4), np.uint32))


@pytest.mark.parametrize("value", [-1.5, float("nan")])
async def test_weights_that_have_diverged_claim_nothing_that_peers_would_refuse(value):
    facts = Facts("me", 1)
    events = EventLog(lambda _: None, peer="me", wall_time_s=lambda: 0.0, stream=None)
    domains = MeasuredDomains(0, lambda: [BLOCKS], np.zeros(1 << 16, np.float32))
    services: Any = SimpleNamespace(facts=facts, events=events)
    validation = Validation(1, services, domains)

    async def send(_: object) -> None:
        await trio.lowlevel.checkpoint()

    line: Any = SimpleNamespace(send=send)
    await validation.begin_next(line, 3)
    said = np.full(3, value, "<f4")
    validation.ended(Evaluated(3, -float(said.mean()), 0.1, said.tobytes()))
    assert validation.is_idle
    told = {BLOCKS.number: 1.5} if np.isfinite(value) else {}
    assert facts.losses_of_domains == told
    assert len(domains.told) == len(told)
