import json

import pytest
from readings import PARAMETERS, ended, reading

from demo.picture import Curve, draw
from demo.reading import Point
from demo.summary import Summary, finished, median_tokens, tokens_until


def summary(**alone):
    peers = [ended("a", loss=1.80), ended("b", loss=1.85), ended("c"), ended("d", averaged=70)]
    return Summary(peers, ended("lone", averaged=0, **({"loss": 1.95} | alone)))


def test_summary_json_has_these_keys_and_no_others():
    tree = json.loads(json.dumps(summary().to_json()))
    assert tree["peers"][0] == {
        "peer_id": "a",
        "has_data": True,
        "ranks": 1,
        "rounds": 82,
        "tokens": 800_000,
        "validation_loss": 1.8,
    }
    assert tree["alone"] == {
        "tokens": 800_000,
        "validation_loss": 1.95,
        "tokens_for_the_same_loss": None,
    }
    assert (tree["gain_nats"], tree["won"]) == (pytest.approx(0.10), True)
    assert tree["outcomes"] == {"averaged": 310, "skipped": {"no_partner": 8}}
    assert tree["bytes_per_parameter_per_round"] == pytest.approx(324 / 310)
    assert tree["total_bytes"] == 4 * 81_001_000
    assert set(tree) == {
        "peers",
        "alone",
        "gain_nats",
        "won",
        "outcomes",
        "bytes_per_parameter_per_round",
        "total_bytes",
    }


def test_no_round_averaged_has_no_bytes_per_round():
    peers = [ended(averaged=0)]
    assert Summary(peers, ended()).to_json()["bytes_per_parameter_per_round"] is None


def test_the_verdict_is_that_of_the_worst_peer():
    assert summary().gain_nats == pytest.approx(0.10)
    assert "every peer beats the one alone, by 0.100 nats" in "\n".join(summary().describe())
    assert summary().won
    close, lost = summary(loss=1.86), summary(loss=1.80)
    assert not close.won
    assert not lost.won
    assert "THE FOUR LOSE" in "\n".join(close.describe())
    assert "0.010 better" in "\n".join(close.describe())
    assert "0.050 worse" in "\n".join(lost.describe())


@pytest.mark.parametrize(
    ("loss", "tokens"),
    [(2.5, 200), (2.0, 200), (1.9, 300), (1.8, 400), (1.75, 600), (1.7, 800), (1.69, None)],
)
def test_tokens_until_a_loss_lie_on_the_curve_of_the_one_alone(loss, tokens):
    curve = [Point(10.0, 2.0), Point(20.0, 1.8), Point(40.0, 1.7)]
    assert tokens_until(curve, loss, 800) == tokens


def test_a_curve_that_rises_again_counts_from_where_it_was_low_first():
    curve = [Point(10.0, 2.0), Point(20.0, 1.8), Point(30.0, 1.9), Point(40.0, 1.7)]
    assert tokens_until(curve, 1.85, 800) == 350


def test_a_peer_that_was_never_validated_has_no_curve():
    assert tokens_until([], 1.8, 800) is None


def test_the_summary_says_how_many_tokens_the_one_alone_needs():
    peers = [ended(loss=1.8), ended(loss=1.85)]
    ahead = Summary(peers, ended(loss=1.95), 1, [Point(20.0, 2.0), Point(40.0, 1.95)])
    assert "tokens that it saw" not in "\n".join(ahead.describe())
    behind = Summary(peers, ended(loss=1.8), 1, [Point(20.0, 1.9), Point(40.0, 1.8)])
    assert "needs 600,000 of the 800,000 tokens that it saw" in "\n".join(behind.describe())
    assert behind.to_json()["alone"]["tokens_for_the_same_loss"] == 600_000


def test_the_last_word_of_a_peer():
    last = finished(reading(step=80), PARAMETERS)
    assert last.parameters == PARAMETERS
    assert (last.rounds, last.averaged, last.skipped) == (4, 3, {"no_partner": 1})
    assert (last.tokens, last.validation_loss) == (80 * 1024, 2.25)
    assert (last.averaging_bytes, last.total_bytes) == (2_000_000, 3_000_000)


def test_the_median_peer_of_four():
    peers = [ended(tokens=n) for n in (100, 400, 200, 301)]
    assert median_tokens(peers) == 250


def test_tokens_of_relays_are_not_compared():
    relay = ended(tokens=9_000, has_data=False)
    assert median_tokens([ended(tokens=100), relay, ended(tokens=300)]) == 200
    assert not finished(reading(part="stage/1"), PARAMETERS).has_data
    assert finished(reading(part="stage/0"), PARAMETERS).has_data


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path):
    curve = Curve("peer-1", [Point(10.0 * r, 3 - r / 10) for r in range(9)], [Point(40.0, 2.6)])
    alone = Curve("alone", [], [])
    draw([curve] * 4, alone, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
