"""Peers of other versions: both sides are told what to install."""

from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
import trio
from raw_client import raw_client
from swarm import START_S, Peer, Swarm, ending

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode
from protocol.address.multiaddr import with_peer_id
from protocol.wire.versions import HELLO, SPOKEN

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

OURS = version_of("loco-peer")
SITE = """
import importlib.metadata
found = importlib.metadata.version
importlib.metadata.version = lambda name: {release!r} if name == "loco-peer" else found(name)
from protocol.wire import versions
others = [each for each in versions.SPOKEN if not each.startswith({name!r})]
versions.SPOKEN = (*others, {spoken!r})
"""
OLDER, NEWER = "0.0.9", "9.0.0"


def words_of(peer: Peer, problem: str) -> str:
    """What its status says of a condition; empty where that does not hold."""
    return next((p["words"] for p in peer.status()["problems"] if p["name"] == problem), "")


@pytest.mark.parametrize(
    ("release", "spoken", "to_it", "to_us"),
    [
        (OLDER, "content/1", ("older", OURS), ("newer", OURS, OLDER)),
        (NEWER, "content/9", ("newer", NEWER, OURS), ("older", NEWER)),
    ],
    ids=["an older one", "a newer one"],
)
def test_a_newcomer_and_a_member_of_other_majors_are_both_told_what_to_install(
    swarm: Swarm,
    tmp_path: Path,
    release: str,
    spoken: str,
    to_it: tuple[str, ...],
    to_us: tuple[str, ...],
) -> None:
    (member, *_) = swarm.at_least(1)
    name = spoken.partition("/")[0] + "/"
    site = swarm.with_site(
        tmp_path / "site", SITE.format(release=release, spoken=spoken, name=name)
    )
    with ending(swarm.join(member, f"of-{release}", environment=site)) as newcomer:
        assert newcomer.wait_exit(START_S) == ExitCode.REFUSED
        words = member.wait_for("the note", partial(words_of, member, "peer-refused"))
        for told, (which, *commands) in ((newcomer.stderr, to_it), (words, to_us)):
            assert f"Yours is {which}: on " in told
            assert f"you (loco-peer {release if told != words else OURS})" in told
            for each in commands:
                assert f"pip install loco-peer=={each} (or an image of {each})" in told


async def test_where_nobody_speaks_our_hello_the_newest_is_to_be_installed(
    swarm: Swarm, tmp_path: Path
) -> None:
    (member, *_) = swarm.at_least(1)
    async with raw_client(tmp_path, member.address) as (network, _):
        address = with_peer_id(network.addresses[0], network.peer_id)
        with ending(swarm.join(address)) as waiting:
            failing = await trio.to_thread.run_sync(
                partial(waiting.wait_event, EventName.BOOTSTRAP_FAILING, START_S)
            )
    assert failing["step"] == "protocol"
    assert failing["detail"].endswith(f"does not speak {HELLO}")
    assert "pip install -U loco-peer" in failing["cure"]


def test_the_command_says_what_is_spoken(swarm: Swarm) -> None:
    told = swarm.loco("version").stdout
    assert told == f"loco-peer {OURS}\nspeaks {', '.join(SPOKEN)}\n"
