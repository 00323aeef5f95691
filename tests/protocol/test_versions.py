"""Versions: what two peers share, and what the refused one reads."""

import pytest

from protocol.wire import versions
from protocol.wire.messages import Hello, decode_message, encode_message

OURS = ("hello/1", "gossip/1", "gossip/2", "content/1")


def test_what_we_speak_can_be_said_and_is_complete() -> None:
    hello = Hello("loco-peer 0.1.0", versions.SPOKEN, None, 1, (), 0.0, "starting", 0, None)
    assert decode_message(encode_message(hello)) == hello
    assert versions.missing(versions.SPOKEN, versions.SPOKEN) == ()
    ids = {f"/loco/{short}" for short in versions.SPOKEN}
    assert ids == {
        versions.HELLO,
        versions.GOSSIP,
        versions.FRAGMENT,
        versions.STAGE,
        versions.REACH,
        versions.CONTENT,
        versions.DIRECTORY,
    }


@pytest.mark.parametrize(
    ("theirs", "missing"),
    [
        (OURS, ()),
        (("hello/1", "gossip/1"), ("content",)),
        (("hello/1", "gossip/3"), ("gossip", "content")),
        (("hello/2", "gossip/3", "fragment/1"), ("hello", "gossip", "content")),
        ((), ("hello", "gossip", "content")),
    ],
)
def test_what_is_missing_is_named(theirs: tuple[str, ...], missing: tuple[str, ...]) -> None:
    assert versions.missing(OURS, theirs) == missing
    assert versions.missing(theirs, OURS) == missing


def test_an_older_peer_is_told_what_to_install() -> None:
    sentence = versions.version_sentence(
        ("hello/1", "gossip/2", "content/2"), versions.SPOKEN, "loco-peer 0.2.0", "loco-peer 0.1.0"
    )
    assert sentence == (
        "we share no version of gossip: you (loco-peer 0.1.0) speak hello/1, gossip/1, content/2, "
        "fragment/1, stage/3, reach/1, directory/1; I (loco-peer 0.2.0) speak hello/1, gossip/2, "
        "content/2. "
        "Install loco-peer 0.2.0 on your machine: pip install -U loco-peer==0.2.0"
    )


def test_a_newer_peer_is_told_that_it_is_ahead() -> None:
    sentence = versions.version_sentence(
        versions.SPOKEN, ("hello/2", "gossip/2", "content/2"), "loco-peer 0.1.0", "loco-peer 0.2.0"
    )
    assert "You are ahead of this swarm: install loco-peer 0.1.0" in sentence


def test_a_peer_that_speaks_nothing_is_told_so() -> None:
    assert "you (x) speak nothing" in versions.version_sentence(OURS, (), "loco-peer", "x")
