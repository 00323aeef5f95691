"""Versions: what two peers share, and what the refused one reads."""

import pytest

from protocol.run.ways import WAYS, conversations_of
from protocol.wire import versions
from protocol.wire.messages import Hello, decode_message, encode_message

OURS = ("hello/1", "gossip/1", "gossip/2", "content/1")


def test_what_we_speak_can_be_said_and_is_complete() -> None:
    hello = Hello("loco-peer 0.1.0", versions.SPOKEN, None, 1, (), 0.0, "starting", 0, None)
    assert decode_message(encode_message(hello)) == hello
    assert versions.missing(versions.SPOKEN, versions.SPOKEN, versions.REQUIRED) == ()
    ids = {f"/loco/{short}" for short in versions.SPOKEN}
    assert ids == {
        versions.HELLO,
        versions.GOSSIP,
        versions.FRAGMENT,
        versions.STAGE,
        versions.EXPERTS,
        versions.REACH,
        versions.CONTENT,
        versions.DIRECTORY,
    }


NEEDED = (*versions.REQUIRED, "gossip")


@pytest.mark.parametrize(
    ("theirs", "missing"),
    [
        (OURS, ()),
        (("hello/1", "gossip/1"), ("content",)),
        (("hello/1", "gossip/3"), ("content", "gossip")),
        (("hello/2", "gossip/3", "fragment/1"), ("hello", "content", "gossip")),
        ((), ("hello", "content", "gossip")),
    ],
)
def test_what_is_missing_is_named(theirs: tuple[str, ...], missing: tuple[str, ...]) -> None:
    assert versions.missing(OURS, theirs, NEEDED) == missing
    assert versions.missing(theirs, OURS, NEEDED) == missing


@pytest.mark.parametrize(
    ("method", "stages", "needed"),
    [("noloco", 1, ("gossip",)), ("diloco", 1, ("fragment",)), ("noloco", 2, ("gossip", "stage"))],
)
def test_a_run_needs_the_conversations_that_it_has(
    method: str, stages: int, needed: tuple[str, ...]
) -> None:
    assert conversations_of(method, stages) == needed
    for way in WAYS:
        assert not versions.missing(versions.SPOKEN, versions.SPOKEN, conversations_of(way, 2))


OLD = ("hello/1", "gossip/1", "content/2"), "loco-peer 0.1.0"
NEW = ("hello/1", "gossip/2", "content/2"), "loco-peer 0.2.0"


def said_to(
    you: tuple[tuple[str, ...], str], other: tuple[tuple[str, ...], str], required=NEEDED
) -> str:
    return versions.version_sentence(you[0], other[0], you[1], other[1], required)


def test_whose_peer_is_older_is_told_what_to_install() -> None:
    assert said_to(OLD, NEW) == (
        "we share no version of gossip: you (loco-peer 0.1.0) speak gossip/1; the other peer"
        " (loco-peer 0.2.0) speaks gossip/2. Yours is older: on your machine, pip install"
        " loco-peer==0.2.0 (or an image of 0.2.0)"
    )


def test_whose_peer_is_newer_is_told_what_either_can_install() -> None:
    assert said_to(NEW, OLD) == (
        "we share no version of gossip: you (loco-peer 0.2.0) speak gossip/2; the other peer"
        " (loco-peer 0.1.0) speaks gossip/1. Yours is newer: on the other machine, pip install"
        " loco-peer==0.2.0 (or an image of 0.2.0). Or, if the run stays with loco-peer 0.1.0, on"
        " your machine, pip install loco-peer==0.1.0 (or an image of 0.1.0)"
    )


def test_two_builds_of_one_version_are_told_so() -> None:
    assert "no release: install the same build" in said_to(OLD, (NEW[0], OLD[1]))


def test_a_peer_that_speaks_nothing_is_told_so() -> None:
    assert "you (x) speak none; the other peer (y) speaks hello/1" in said_to(
        ((), "x"), (OURS, "y"), ("hello",)
    )


@pytest.mark.parametrize(
    "software", ["evil 1.0", "loco-peer 1; rm -rf /", "loco-peer", "", "x" * 64]
)
def test_what_a_stranger_calls_itself_comes_into_no_command(software: str) -> None:
    sentence = said_to(OLD, (NEW[0], software))
    assert "pip" not in sentence
    assert sentence.endswith("on your machine, install the loco-peer that it runs")
