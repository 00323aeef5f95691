"""What a peer measures, and when that is worth telling."""

import random

import pytest

from protocol.limits import MAX_LINKS
from protocol.routing.measures import CHANGE, ENOUGH, KEPT_SAMPLES, LinkTimes, Measures


def told(measures):
    return measures.vector("me", 1, 1, 4)


def fill(measures, rtt_s=0.04, line_s=0.01, work_s=0.1, samples=KEPT_SAMPLES, spread=0.0, seed=0):
    draws = random.Random(seed)

    def noisy(seconds):
        return seconds * (1 + spread * draws.uniform(-1, 1))

    for _ in range(samples):
        measures.round_trip("other", noisy(rtt_s))
        measures.sent("other", noisy(rtt_s + line_s))
        measures.received("other", noisy(line_s))
        measures.forward.add(noisy(work_s))
        measures.backward.add(noisy(2 * work_s))


def test_lines_are_what_boundaries_take_beyond_the_round_trip():
    measures = Measures()
    fill(measures)
    (link,) = measures.links()
    assert link == LinkTimes("other", 40_000, 10_000, 10_000)
    assert (measures.work().forward_us, measures.work().backward_us) == (100_000, 200_000)
    assert measures.work().loss_us == 0  # unknown


def test_nothing_is_known_from_a_few_samples():
    measures = Measures()
    fill(measures, samples=ENOUGH - 1)
    assert measures.links() == (LinkTimes("other"),)


def test_what_was_in_the_way_of_a_few_boundaries_does_not_count():
    measures = Measures()
    fill(measures)
    for _ in range(KEPT_SAMPLES // 2):
        measures.sent("other", 5.0)
    assert measures.links()[0].out_us == 10_000


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_quarter_is_not_told(seed):
    measures = Measures()
    fill(measures, spread=0.25, seed=seed)
    assert told(measures) is not None
    for later in range(1, 40):
        fill(measures, spread=0.25, samples=4, seed=1000 * seed + later)
        assert told(measures) is None


@pytest.mark.parametrize(("what", "times"), [("rtt_s", 2.0), ("line_s", 3.5), ("work_s", 2.0)])
def test_a_value_that_moves_is_told_with_the_next_number(what, times):
    measures = Measures()
    usual = {"rtt_s": 0.04, "line_s": 0.01, "work_s": 0.1}
    fill(measures, **usual)
    first = told(measures)
    fill(measures, **usual | {what: usual[what] * (1 + CHANGE - 0.05)})
    assert told(measures) is None
    fill(measures, **usual | {what: usual[what] * times})
    second = told(measures)
    assert (first.number, second.number) == (1, 2)
    assert told(measures) is None


def test_peers_that_come_and_go_are_told():
    measures = Measures()
    fill(measures)
    told(measures)
    measures.round_trip("new", 0.1)
    assert [link.peer_id for link in told(measures).links] == ["new", "other"]
    measures.keep(["new"])
    assert [link.peer_id for link in told(measures).links] == ["new"]


def test_links_are_bounded():
    measures = Measures()
    for number in range(MAX_LINKS + 5):
        measures.sent(f"peer{number:04}", 1.0)
    assert len(measures.links()) == MAX_LINKS
