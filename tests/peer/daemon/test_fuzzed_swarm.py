"""A hostile peer that says everything the wire schema allows, and nearly so: the others train on.

`python -m bench.fuzz` says far more.
"""

import pytest
from existing import existing

from bench.fuzzing.swarms import METHODS, FoundBug, Siege, besieged
from peer.averaging.gossip.exchanges import Exchanges
from peer.content.service import ContentService
from peer.network.relay import Relay
from protocol.errors import leaves

pytestmark = pytest.mark.slow

EXAMPLES = 3
"""Volleys that begin with each type of message."""
POOL = 5


@pytest.mark.parametrize("linked", [True, False], ids=["a member", "a stranger"])
@pytest.mark.parametrize(
    "method", [METHODS[0], *(pytest.param(name, marks=pytest.mark.long) for name in METHODS[1:])]
)
def test_fuzzed_messages_end_nobody_and_the_others_average_on(tmp_path, method, linked):
    fired = besieged(Siege(method, linked, EXAMPLES, POOL), tmp_path)
    assert fired.total() > 20 * EXAMPLES


PLANTED = IndexError("planted")


def broken(*_: object) -> None:
    raise PLANTED


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "name"),
    [(Exchanges, "runs"), (ContentService, "_send_piece"), (Relay, "_reach")],
    ids=["an exchange", "a piece of the corpus", "a relay"],
)
def test_a_planted_bug_is_found(tmp_path, monkeypatch, where, name):
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(FoundBug, match="Volley") as found:
        besieged(Siege("noloco", True, 4 * EXAMPLES, 4 * POOL), tmp_path)
    assert list(leaves(existing(found.value.__cause__))) == [PLANTED]
