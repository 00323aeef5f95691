"""What is said of failed dials: p2pd's words in, a sentence with cause and cure out."""

import pytest
from network_worlds import peer_id_of

from peer.network.dial_errors import BACKOFF, cure_of, dial_sentence, mismatch_sentence

EXPECTED, FOUND = peer_id_of("expected"), peer_id_of("found")
DIALS = f"failed to dial: failed to dial {EXPECTED}: all dials failed"
REFUSED = "* [/ip4/127.0.0.1/tcp/9] dial tcp4 127.0.0.1:9: connect: connection refused"
LATER = f"* [/ip4/192.0.2.7/tcp/31337] {BACKOFF}"
OTHER = (
    "* [/ip4/127.0.0.1/tcp/5] failed to negotiate security protocol: peer id mismatch: expected"
    f" {EXPECTED}, but remote key matches {FOUND}"
)


def sentence(*causes: str) -> str:
    return dial_sentence(EXPECTED, Exception("\n  ".join([DIALS, *causes])))


def test_the_cause_is_said_without_what_stands_around_it() -> None:
    begin = f"dial: cannot reach {EXPECTED}: "
    assert sentence(REFUSED) == f"{begin}127.0.0.1:9: connection refused"
    assert sentence(LATER, REFUSED) == f"{begin}127.0.0.1:9: connection refused"
    assert BACKOFF in sentence(LATER)
    slow = "* [/ip6/2001:db8::1/tcp/7] dial tcp6 [2001:db8::1]:7: i/o timeout"
    assert sentence(slow, REFUSED) == (
        f"{begin}2001:db8::1:7: timed out; 127.0.0.1:9: connection refused"
    )


def test_another_peer_is_said_plainly_with_both_ids() -> None:
    said = sentence(LATER, REFUSED, OTHER)
    assert said == mismatch_sentence(EXPECTED, FOUND, "127.0.0.1:5")
    assert f"expected ...{EXPECTED[-8:]}, found ...{FOUND[-8:]}" in said
    assert len(said) < 120
    assert "take the join line anew" in cure_of(said)


def test_words_that_are_not_known_are_kept() -> None:
    assert dial_sentence(EXPECTED, Exception("no addresses")).endswith(": no addresses")


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("dial: cannot connect to h:1: Connection refused", "check the port"),
        ("dial: cannot connect to h:1: No route to host", "firewall"),
        ("dial: cannot connect to h:1: nothing came in 10 s", "firewall"),
        ("dial: no answer within 20 s", "firewall"),
        ("resolve: no address is known for h:1: Name or service not known", "look names up"),
        ("protocol: h:1 does not speak libp2p: it hung up", "metrics"),
        ("protocol: 12D3a does not speak /loco/hello/1", "pip install -U loco-peer"),
        ("refusal of another kind: this run takes invited peers alone", ""),
    ],
)
def test_each_has_what_would_help(words: str, cure: str) -> None:
    assert cure in cure_of(words)
    assert bool(cure) == bool(cure_of(words))
