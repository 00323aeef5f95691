"""The table of all pairs: what each peer tells of its averages, this peer first."""

from peer.daemon.report import MOST_PEERS, pairs_json
from peer.facts import Facts


def test_a_row_is_what_one_peer_tells() -> None:
    facts = Facts("me", 1)
    facts.count_partner("b", 1.0)
    facts.count_partner("b", 2.0)
    facts.count_others_partners("b", [("me", 4.0)])
    facts.count_others_partners("b", [("c", 0.5)])
    facts.count_others_partners("b", [("nobody-we-know", 9.0)])
    assert pairs_json(facts, ["b", "c"]) == {
        "peers": ["me", "b", "c"],
        "averages": [[0, 2, 0], [1, 0, 1], [0, 0, 0]],
        "average_s": [[None, 1.5, None], [4.0, None, 0.5], [None, None, None]],
    }


def test_it_is_no_larger_than_can_be_read() -> None:
    told = pairs_json(Facts("me", 1), [str(number) for number in range(100)])
    assert len(told["peers"]) == len(told["averages"]) == len(told["average_s"][0]) == MOST_PEERS


def test_nobody_speaks_for_this_peer() -> None:
    facts = Facts("me", 1)
    facts.count_others_partners("me", [("b", 4.0)])
    assert pairs_json(facts, ["b"])["averages"] == [[0, 0], [0, 0]]
