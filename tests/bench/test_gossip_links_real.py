"""What the swarm behind unequal links runs, and how long its rounds are made."""

import pytest

from bench.gossip_links_real import (
    SETTINGS,
    Found,
    commit_of,
    fitting_inner_steps,
    rows_of,
    share_of_round,
)
from bench.gossip_report import Window, peer_figures
from bench.routed_network import THIN_BITS_PER_S, THIN_HOST, cases, rate_between, six_links
from protocol.run.run_spec import parse_toml

WINDOW = Window(0.0, 100.0)


def found(setting, round_s, exchange_s, rounds=10):
    events = []
    for number in range(rounds):
        at_s = 10.0 * number
        events += [
            {"event": "RoundClosed", "time": at_s, "steps": 20, "seconds": round_s},
            {"event": "RoundAveraged", "time": at_s, "partner": "1", "seconds": exchange_s},
        ]
    figures = [peer_figures(name, events, WINDOW, 20, 200.0) for name in ("0", "1")]
    return Found(setting, "abc1234", WINDOW, figures, [2.0], {})


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_run_specs(name):
    spec = parse_toml(SETTINGS[name].to_toml())
    assert (spec.sync.method, spec.sync.overlap) == ("noloco", True)
    assert spec.sync.inner_steps == SETTINGS[name].inner_steps


def test_rounds_are_made_as_long_as_their_exchanges_want():
    # 2 steps per second; an exchange of 2 s is a quarter of 8 s, which are 16 steps.
    seen = found(SETTINGS["quarter"], round_s=5.0, exchange_s=2.0)
    assert fitting_inner_steps(seen) == 16
    assert share_of_round(seen.peers[0]) == pytest.approx(0.4)
    assert fitting_inner_steps(found(SETTINGS["most"], round_s=5.0, exchange_s=0.1)) == 2


def test_there_is_a_row_for_each_peer_and_one_for_all():
    rows = rows_of(found(SETTINGS["quarter"], round_s=5.0, exchange_s=2.0))
    assert [row["peer"] for row in rows] == ["0", "1", "all"]
    assert {row["setting"] for row in rows} == {"quarter, abc1234"}
    assert [row["exchanged"] for row in rows] == pytest.approx([1.0] * 3)


def test_the_thin_host_is_in_no_case_that_is_not_about_it():
    table = six_links()
    assert table.rate(THIN_HOST, 0) == THIN_BITS_PER_S
    assert [case.name for case in cases(table) if any(THIN_HOST in way for way in case.ways)] == [
        "one on each of six links",
        "two through the thin uplink",
    ]


def test_a_rate_is_that_between_two_times():
    seen = [(0.0, 0), (1.0, 1000), (2.0, 1100), (3.0, 1200), (9.0, 9000)]
    assert rate_between(seen, 0.5, 3.5) == pytest.approx(100.0)
    assert rate_between(seen, 3.5, 8.0) == 0.0


def test_a_tree_without_git_is_known_by_its_folder(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    assert commit_of(tree) == "tree"
