"""An earlier loco-peer: its homes come back at their step, in each way of averaging; its peers and
those of today train in one swarm; and what it said is answered, word for word."""

import io
import subprocess
import tarfile
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from raw_client import ANSWER_S, raw_client
from recorded_homes import RECORDED, Recorded
from recorded_wire import RecordedWire, recorded_versions
from swarm import START_S, Peer, Swarm, none_blamed, open_swarm

from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from protocol.errors import Refused
from protocol.outcomes import RefusalReason
from protocol.wire.content_messages import BlobReply, Holdings, SpecReply, StateScalars
from protocol.wire.fields import Message
from protocol.wire.frames import encode_frame
from protocol.wire.messages import Accept, Beat, Hello, Seen

ROOT: Final = Path(__file__).parents[2]
VERSIONS: Final = recorded_versions()
each_version = pytest.mark.parametrize("before", VERSIONS, ids=lambda each: each.release)
ANSWERS: Final[dict[str, type[Message]]] = {
    "GetSpec": SpecReply,
    "GetBlob": BlobReply,
    "GetState": StateScalars,
    "GetHoldings": Holdings,
    "Whereabouts": Seen,
    "Propose": Accept,
}
"""To what opens a conversation."""
TOGETHER_S: Final = 4 * START_S
"""For a round of three peers on a busy machine."""
REFUSED: Final = {("Propose", RefusalReason.BUSY), ("Propose", RefusalReason.BEHIND)}
"""Answers to a peer that comes from a later step."""
pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def homes(tmp_path) -> Iterator[Swarm]:
    with open_swarm(tmp_path) as swarm:
        yield swarm


def started_again(
    homes: Swarm, *names: str, old: Collection[str] = (), **of_old: Any
) -> list[tuple[Peer, Recorded]]:
    """The peers of these homes, as their users start them after an upgrade, at new addresses.

    Those in `old` were not upgraded.
    """
    recorded = [each for each in RECORDED if each.name in names]
    peers = list[Peer]()
    for each in recorded:
        each.unpack(homes.folder("."))
        how = ("join", "--bootstrap", peers[0].address) if peers else ("start", "--alone")
        peers.append(homes.launch(each.name, *how, **(of_old if each.name in old else {})))
    return list(zip(peers, recorded, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [("diloco-a",), ("stages-a", "stages-b")],
    ids=lambda names: names[0].removesuffix("-a"),
)
def test_a_recorded_home_comes_back_at_its_step_and_trains_on(
    homes: Swarm, names: tuple[str, ...]
) -> None:
    for peer, recorded in started_again(homes, *names):
        resumes(peer, recorded)


def resumes(peer: Peer, recorded: Recorded) -> None:
    resumed = peer.wait_event(EventName.RUN_RESUMED, START_S)
    assert resumed["step"] == recorded.step
    assert peer.status()["run_id"] == recorded.run_id
    peer.wait_for("steps", partial(trains_on, peer, recorded.step), START_S)


def has_averaged(peer: Peer) -> bool:
    return peer.metric("loco_outer_rounds_total", outcome="averaged") > 0


def trains_on(peer: Peer, step: int) -> bool:
    """Whether it has closed a round beyond this step."""
    return any(event["step"] > step for event in peer.events(EventName.ROUND_CLOSED))


# --- the version before, beside this one ----------------------------------------------------------
@pytest.fixture
def tree_of(tmp_path: Path, homes: Swarm):
    """How to start peers of a recorded version, from its tree."""

    def unpack(before: RecordedWire) -> dict[str, Any]:
        archive_of = ["git", "archive", before.commit, "peer", "protocol"]
        git = subprocess.run(archive_of, cwd=ROOT, capture_output=True, check=False)
        if git.returncode != 0:
            pytest.skip(f"no git history with {before.commit[:12]} here")
        tree = tmp_path / "tree"
        with tarfile.open(fileobj=io.BytesIO(git.stdout)) as archive:
            archive.extractall(tree, filter="data")
        return {"cwd": tree, "environment": homes.environment | {"PYTHONPATH": str(tree)}}

    return unpack


@pytest.mark.long
@each_version
@pytest.mark.parametrize("old", ["a", "b"])
@pytest.mark.parametrize("run", ["pairs", "diloco", "stages"])
def test_peers_of_both_versions_train_in_one_swarm(
    homes: Swarm, tree_of, before: RecordedWire, run: str, old: str
) -> None:
    names = [f"{run}-{each}" for each in "ab"]
    both = started_again(homes, *names, old={f"{run}-{old}"}, **tree_of(before))
    peers = [peer for peer, _ in both]
    newcomer = homes.join(peers[0], "newcomer")
    for peer, recorded in both:
        peer.wait_for("steps", partial(trains_on, peer, recorded.step), TOGETHER_S)
    newcomer.wait_event(EventName.ROUND_CLOSED, TOGETHER_S)
    if run != "stages":  # where a stage has one peer
        for peer in (*peers, newcomer):
            peer.wait_for("an average", partial(has_averaged, peer), TOGETHER_S)
    none_blamed([*peers, newcomer])


@each_version
async def test_a_home_in_pairs_trains_on_and_what_was_said_is_answered(
    homes: Swarm, tmp_path: Path, before: RecordedWire
) -> None:
    ((member, recorded),) = await trio.to_thread.run_sync(started_again, homes, "pairs-a")
    await trio.to_thread.run_sync(resumes, member, recorded)
    newcomers = {said.kind: said for said in before.said if said.by == "pairs-c"}
    (folder := tmp_path / "raw").mkdir()
    async with raw_client(folder, member.address) as (network, peer_id):

        async def says(kind: str, talk: Conversation | None = None) -> Conversation:
            said = newcomers[kind]
            stream = await network.open_stream(peer_id, said.conversation)
            await stream.send_all(encode_frame(said.header))
            return Conversation(stream)

        link = await says("Hello")
        assert (await link.receive(Hello, timeout_s=ANSWER_S))[0].run_id == RECORDED[2].run_id
        for kind, answer in ANSWERS.items():
            async with await says(kind) as talk:
                try:
                    await talk.receive(answer, timeout_s=ANSWER_S)
                except Refused as refused:
                    if (kind, refused.reason) not in REFUSED:
                        raise
        with trio.fail_after(ANSWER_S):
            while not isinstance((await link.receive())[0], Beat):
                pass
        await link.aclose()
