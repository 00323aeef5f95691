import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.__main__ import main
from demo.plan import INNER_STEPS, METHODS, PEERS, Plan, to_toml, whole_rounds
from protocol.fragment.fragments import fragments_of_run
from protocol.run.layout import Layout
from protocol.run.run_spec import parse_toml


@given(st.integers(30, 100_000))
def test_alone_trains_hardly_more_than_the_median_peer(steps):
    done, inner_steps = whole_rounds(steps)
    assert done % inner_steps == 0
    assert 0 <= done - steps <= 6
    assert abs(inner_steps - INNER_STEPS) <= 3


def test_the_swarms_own_round_length_is_preferred():
    assert whole_rounds(800) == (800, INNER_STEPS)
    assert whole_rounds(763) == (763, 7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [1024 * 31 - 5, 1024 * 777, 1024 * 777 + 1, 1024 * 700])
def test_the_lone_run_has_as_many_tokens_and_the_same_schedule(method, tokens):
    plan = Plan(seed=7, method=method)
    swarm, lone = plan.swarm_spec(), plan.lone_spec(tokens)
    trained = lone.total_rounds * lone.sync.inner_steps * lone.tokens_per_step
    assert 0 <= trained - tokens <= 6 * lone.tokens_per_step
    assert lone.seed == swarm.seed == 7
    assert (lone.model, lone.data) == (swarm.model, swarm.data)
    same = {"learning_rate", "warmup_steps"}
    assert lone.optimizer.model_dump(exclude=same) == swarm.optimizer.model_dump(exclude=same)


def test_the_outer_step_of_one_peer_alone_changes_nothing():
    sync = Plan().lone_spec(1024).sync
    assert (sync.alpha, sync.beta, sync.codec) == (0.0, 1.0, "fp32")


@pytest.mark.parametrize("plan", [Plan(seed=3, steps=30), *(Plan(method=m) for m in METHODS)])
def test_specs_survive_the_file(plan):
    for spec in (plan.swarm_spec(), plan.lone_spec(30_000)):
        assert parse_toml(to_toml(spec)) == spec


def test_the_last_peer_alone_is_a_box():
    numbers = range(1, PEERS + 1)
    told = [Plan(box=3).options_of(number) for number in numbers]
    assert told == [[], [], [], ["--gpus", "3"]]
    assert not any(Plan().options_of(number) for number in numbers)


def test_a_box_in_a_pipeline_is_refused(tmp_path, monkeypatch, capsys):
    out = ["--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["demo", *out, "--method", "pipeline", "--box", "2"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--box: with noloco or diloco alone, not with pipeline" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_box_of_no_process_is_refused(tmp_path, monkeypatch, capsys):
    out = tmp_path / "in" / "out"  # whose folder cannot be made
    (tmp_path / "in").touch()
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(out), "--box", "0"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--box 0: a peer trains in one process at least" in capsys.readouterr().err


def test_a_round_of_fragments_is_sent_in_as_many_parts():
    plan = Plan(method="diloco")
    spec, model = plan.swarm_spec(), plan.swarm_spec().model
    layout = Layout.from_shapes(
        {"embed": (256, model.hidden_size)}
        | {f"layers.{layer}.weight": (model.hidden_size,) for layer in range(model.num_layers)}
    )
    assert spec.sync.diloco is not None
    assert plan.sends_per_round == len(fragments_of_run(spec.sync.diloco, layout)) == 3
    assert Plan().sends_per_round == 1
