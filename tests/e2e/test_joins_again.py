"""A process that joins again in a new one, beside a stranger that says nonsense of where it is."""

import itertools
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from missiles import hello
from msgspec.structs import replace
from raw_client import ANSWER_S, raw_client
from swarm import INNER_STEPS, START_S, Swarm, ending
from test_hostile import beat

from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.state.kept_files import Acquaintances
from protocol.errors import StreamLost
from protocol.membership.group import Group
from protocol.schedule.rounds import LOST_LAG_ROUNDS
from protocol.wire.messages import Hello
from protocol.wire.versions import HELLO

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]

AHEAD_S = 600.0
"""For the others to train further ahead than weights may be."""
NONSENSE = ("/quic-v1", "/ip4/127.0.0.1/tcp/0", "/ip4/192.0.2.1/tcp/1/p2p-circuit")
"""Readable as addresses; p2pd dials none of them, and `--bootstrap` takes none."""


async def test_where_strangers_say_that_they_are_does_not_keep_it_from_joining_again(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (other, *_) = swarm.at_least(1)
    folder = Path(tmp_path_factory.mktemp("raw"))
    in_thread = trio.to_thread.run_sync
    with ending(swarm.join(other)) as victim:
        await in_thread(victim.wait_averaging)
        status = victim.status()
        group = Group(status["run_id"]).digest
        async with (
            raw_client(folder, victim.address) as (network, peer_id),
            trio.open_nursery() as nursery,
        ):
            talk = Conversation(await network.open_stream(peer_id, HELLO))
            await talk.send(replace(hello(run_id=status["run_id"]), addresses=NONSENSE))
            await talk.receive(Hello, timeout_s=ANSWER_S)

            @nursery.start_soon
            async def seem_to_train() -> None:
                with suppress(StreamLost):  # the victim joins again
                    for sequence in itertools.count(1):
                        step = (await in_thread(other.status))["step"]
                        await talk.send(beat(sequence, group, step, float(INNER_STEPS)))
                        await trio.sleep(1.0)

            swarm.loco("pause", "--home", str(victim.home.root))
            paused = await in_thread(lambda: victim.wait_event(EventName.TRAINING_PAUSED, START_S))
            due = paused["step"] + (LOST_LAG_ROUNDS + 2) * INNER_STEPS
            await in_thread(
                lambda: other.wait_for("it is ahead", lambda: other.status()["step"] > due, AHEAD_S)
            )
            swarm.loco("resume", "--home", str(victim.home.root))
            await in_thread(
                lambda: victim.wait_event(EventName.DAEMON_STARTED, START_S, incarnation=2)
            )
            seen = len(victim.events())
            assert "joining again in a new process" in victim.stderr
            known = Acquaintances(victim.home.neighbours_path).read()
            assert known.keys() >= {other.peer_id, network.peer_id}
            assert known[network.peer_id] == NONSENSE
            averaged = EventName.ROUND_AVERAGED
            await in_thread(lambda: victim.wait_event(averaged, START_S, after=seen))
            nursery.cancel_scope.cancel()
