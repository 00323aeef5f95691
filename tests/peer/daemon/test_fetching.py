"""What a joiner does when peers do not give it what it asks for."""

import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.content.service import ContentService
from peer.daemon.sources import PERMANENT_REFUSALS
from peer.observe.event_names import EventName
from protocol.errors import Refused
from protocol.outcomes import RefusalReason
from protocol.schedule.rounds import LOST_LAG_ROUNDS
from protocol.wire.content_messages import GetBlob, GetSpec, GetState
from protocol.wire.fields import Message
from simulation.swarm import SimulatedSwarm, open_swarm

pytestmark = pytest.mark.slow

WAIT_S = 30.0
PASSING = RefusalReason.UNAVAILABLE, RefusalReason.TOO_MANY, RefusalReason.BUSY


class Refusing:
    """Makes peers refuse one kind of request to the state service, until told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: type[Message]) -> None:
        self._reasons: dict[str, RefusalReason] = {}
        self.asked = 0
        plain, world = ContentService._answer, self

        async def answer(service, reader, request):
            reason = world._reasons.get(service.network.peer_id)
            if reason is None or not isinstance(request, what):
                return await plain(service, reader, request)
            world.asked += 1
            raise Refused(reason, f"no: {reason}")

        monkeypatch.setattr(ContentService, "_answer", answer)

    def refuse(self, swarm: SimulatedSwarm, **reasons: RefusalReason | None) -> None:
        self._reasons = {swarm[name].peer_id: why for name, why in reasons.items() if why}


@pytest.mark.parametrize("what", [GetSpec, GetBlob, GetState])
@pytest.mark.parametrize("reason", sorted(PERMANENT_REFUSALS))
def test_when_everybody_refuses_for_good_the_join_ends(tmp_path, monkeypatch, what, reason):
    @simulated()
    async def join() -> None:
        async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
            refusing = Refusing(monkeypatch, what)
            await start(swarm, "a", "b")
            refusing.refuse(swarm, a=reason, b=reason)
            c = swarm.join("c")
            with trio.fail_after(WAIT_S):
                await c.ended.wait()
            assert isinstance(c.failure, Refused)
            assert (c.failure.reason, str(c.failure)) == (reason, f"no: {reason}")
            assert not c.ready.is_set()

    join()


@pytest.mark.parametrize("reason", PASSING)
def test_what_may_pass_is_asked_for_again(tmp_path, monkeypatch, reason):
    @simulated()
    async def join() -> None:
        async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
            refusing = Refusing(monkeypatch, GetSpec)
            await start(swarm, "a")
            refusing.refuse(swarm, a=reason)
            c = swarm.join("c")
            await trio.sleep(WAIT_S)
            assert refusing.asked > 10
            assert not c.ended.is_set()
            assert f"could not help: no: {reason}" in c.facts.doing
            refusing.refuse(swarm)
            await swarm.until(c.ready.is_set)

    join()


@pytest.mark.parametrize("other", [None, RefusalReason.TOO_MANY])
def test_one_who_refuses_for_good_does_not_speak_for_the_others(tmp_path, monkeypatch, other):
    @simulated()
    async def join() -> None:
        async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
            refusing = Refusing(monkeypatch, GetState)
            await start(swarm, "a", "b")
            refusing.refuse(swarm, a=RefusalReason.NOT_ADMITTED, b=other)
            c = swarm.join("c")
            if other is not None:
                await trio.sleep(WAIT_S)
                assert refusing.asked > 10
                assert not c.ended.is_set()
                refusing.refuse(swarm, a=RefusalReason.NOT_ADMITTED)
            await swarm.until(c.ready.is_set)
            (received,) = c.events(EventName.STATE_RECEIVED)
            assert received["remotes"] == [swarm["b"].peer_id]

    join()


def test_a_state_that_would_be_lost_at_once_is_not_taken(tmp_path, monkeypatch):
    @simulated()
    async def join() -> None:
        async with open_swarm(1, toy_spec(60), tmp_path) as swarm:
            refusing = Refusing(monkeypatch, GetState)
            await start(swarm, "a", "b", "d")
            await swarm.until(lambda: swarm["b"].facts.round == 2)
            swarm["b"].gate.close()  # its trainer stands still; it goes on to beat and to serve
            await swarm.until(lambda: swarm["a"].facts.step > (LOST_LAG_ROUNDS + 5) * 20)
            refusing.refuse(swarm, a=RefusalReason.TOO_MANY, d=RefusalReason.TOO_MANY)
            c = swarm.join("c")
            await swarm.until(lambda: hasattr(c, "facts"))
            with trio.fail_after(WAIT_S):
                await swarm.until(lambda: "my state is of step" in c.facts.doing)
            assert not c.events(EventName.STATE_RECEIVED)
            refusing.refuse(swarm)
            await swarm.until(c.ready.is_set)
            (received,) = c.events(EventName.STATE_RECEIVED)
            assert received["remotes"] != [swarm["b"].peer_id]
            assert c.failure is None

    join()
