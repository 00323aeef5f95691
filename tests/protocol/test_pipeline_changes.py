"""What would help: the change that does comes out, in words, and what does not is not told."""

from dataclasses import replace

import pytest
from offers_worlds import WORKLOAD, offers_at, question

from protocol.pipeline import what_if
from protocol.pipeline.pipelines import skipping_pipeline
from protocol.pipeline.question import EFFORTS, effort_for
from protocol.pipeline.what_if import LEAST_HELP, what_helps


def helped(asked):
    return what_helps(asked, skipping_pipeline(asked))


@pytest.mark.slow
def test_a_second_relay_helps_where_one_has_to_do_everything():
    alone = offers_at("LA", "LA", compute_us=2_000_000, slots=4)
    asked = question((*alone, *offers_at("Oregon", slots=4)), stages=3, visited=3)
    slow = replace(asked.offers[2], compute_us=8_000_000)
    found = helped(replace(asked, offers=(*asked.offers[:2], slow)))
    words = [gain.change for gain in found.gains]
    assert any(w.startswith("a second relay for stage") and " in LA like LA-0" in w for w in words)
    shares = [gain.share for gain in found.gains]
    assert shares == sorted(shares)
    assert shares[0] < -0.15
    assert max(shares) < -LEAST_HELP


@pytest.mark.slow
def test_what_gains_less_than_the_noise_is_not_told():
    # One microbatch and ways that take nearly all of its time, on links of full speed.
    far = offers_at("Australia", "London", "Iowa", compute_us=30_000)
    found = helped(question(far, stages=3, visited=3, microbatches=1, codec="int8"))
    assert [gain for gain in found.gains if "twice" in gain.change] == []


@pytest.mark.slow
def test_places_are_as_many_as_the_effort_allows(monkeypatch):
    asked = question(workload=replace(WORKLOAD, hidden_size=40_000))
    now = skipping_pipeline(asked)
    tried = []
    real = what_if._one_more

    def one_more(asked, now, stage, model):
        tried.append((stage, model))
        return real(asked, now, stage, model)

    monkeypatch.setattr(what_if, "_one_more", one_more)
    what_helps(asked, now)
    fastest = {0, 2, 3, 4, 5}  # of the two in Iowa the first
    assert set(tried) == {(stage, model) for stage in range(3) for model in fastest}


def test_more_machines_get_less_effort_and_it_is_told():
    assert effort_for(8).told(8) == ""
    assert effort_for(200).told(200) == (
        "200 machines are many, so less was tried (iterations simulated for a plan: 300, not 2,700;"
        " numbers of data peers tried: 1, not 3; places tried for one more machine: 3, not 24;"
        " nothing that would help was planned anew)"
    )
    assert "numbers of data peers" not in effort_for(40).told(40)
    assert effort_for(1000).told(1000).endswith("; no lower bound)")
    assert not effort_for(1024).bound
    assert effort_for(8, 7).evaluations == 7
    limits = [effort.machines for effort in EFFORTS]
    assert limits == sorted(limits)
    work = [effort.simulated for effort in EFFORTS]
    assert work == sorted(work, reverse=True)
