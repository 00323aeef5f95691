"""What bench/time_to_loss.py runs, on which processors, and what its table says."""

import json
import math

import numpy as np
import pytest
import torch

from bench.router.network import missing
from bench.time_to_loss import (
    HOSTS,
    Made,
    cores_of,
    goals_of,
    main,
    options,
    read_results,
    rows_of,
    seconds_to,
    spec_of,
    wanted,
)
from bench.time_to_loss_arms import Task, curve_of, lines_of, most_batches, warmup_of
from bench.time_to_loss_rival import OUTER_MOMENTUM, OUTER_RATE, outer_step


def line(arm, losses, rate=0.01, seed=0, accumulate=0, outer=None):
    curve = [
        {"s": 10.0 * number, "own": loss + 0.1, "mean": loss}
        for number, loss in enumerate(losses, start=1)
    ]
    if outer is not None:
        curve[-1]["outer"] = outer
    return {
        "arm": arm,
        "mbit_per_s": 100.0,
        "seed": seed,
        "rate": rate,
        "seconds": 10.0 * len(losses),
        "accumulate": accumulate,
        "sync": "",
        "curve": curve,
        "steps": [7] * HOSTS,
        "averages": [3] * HOSTS,
        "router": {"core_share": 0.1, "late_ms": 0.2},
    }


def test_each_host_of_each_arm_has_a_processor_of_its_own_where_there_are_enough():
    slots = [cores_of(slot, range(16), at_once=3) for slot in range(3)]
    of_hosts = [core for cores, _ in slots for core in cores]
    assert len({*of_hosts}) == len(of_hosts) == 3 * HOSTS
    for _, of_line in slots:
        assert not {*of_line} & {*of_hosts}
        assert 15 in of_line
    assert cores_of(0, [0, 1], at_once=1) == ([0, 1, 0, 1], [0])


def test_an_arm_that_sends_nothing_is_made_on_one_line_and_only_ddp_accumulates():
    arguments = ["--out", "x", "--arms", "alone", "ddp", "pairs", "--lines", "20", "100"]
    made = wanted(options([*arguments, "--accumulate", "1", "4"]))
    assert [(each.arm, each.mbit_per_s, each.accumulate) for each in made] == [
        ("alone", 20, 0),
        ("ddp", 20, 1),
        ("ddp", 20, 4),
        ("pairs", 20, 0),
        ("ddp", 100, 1),
        ("ddp", 100, 4),
        ("pairs", 100, 0),
    ]


@pytest.mark.parametrize(("arm", "method"), [("pairs", "noloco"), ("fragments", "diloco")])
def test_the_run_is_the_demos_at_a_constant_rate_without_validation(arm, method):
    spec = spec_of(Made(arm, 100.0, 3, 0.012, 120.0, 0), steps_per_s=4.0)
    assert (spec.sync.method, spec.seed, spec.optimizer.schedule) == (method, 3, "constant")
    assert spec.optimizer.muon is not None
    assert spec.optimizer.muon.learning_rate == 0.012
    assert spec.optimizer.learning_rate == pytest.approx(0.002)
    assert spec.optimizer.warmup_steps == 48
    assert spec.sync.validate_every > spec.total_rounds // 2


def test_keys_of_sync_are_for_real_daemons_alone():
    arguments = ["--out", "x", "--arms", "pairs", "diloco", "--lines", "20"]
    pairs, diloco = wanted(options([*arguments, "--sync", "inner_steps=4", "codec=int8-diff"]))
    sync = spec_of(pairs, 1.0).sync
    assert (sync.inner_steps, sync.codec) == (4, "int8-diff")
    assert pairs.folder == "pairs-20-0-0.012-0-inner_steps=4-codec=int8-diff"
    assert not diloco.sync


def test_a_warm_up_fits_the_steps_that_there_are():
    assert [warmup_of(steps) for steps in (9.0, 25.0, 300.0, 5000.0)] == [0, 2, 30, 60]


def test_ddp_sums_as_often_as_the_line_and_the_processor_have_equal_shares():
    assert [most_batches(0.1, sum_s) for sum_s in (0.01, 0.42, 100.0)] == [1, 4, 32]


def test_all_lines_are_alike():
    table = lines_of(task(mbit_per_s=20.0))
    assert {link.bits_per_s for link in table.links.values()} == {20e6}
    assert {table.round_trip_s(a, b) for a, b in table.links} == {0.08}
    assert table.uplinks_bits_per_s == [20e6] * HOSTS


def task(**changes):
    given = dict.fromkeys(Task.__dataclass_fields__, 0)
    return Task(**{**given, "arm": "pairs", "hosts": HOSTS, **changes})


def test_the_time_to_a_loss_lies_between_two_looks():
    curve = line("pairs", [3.0, 2.0, 1.0])["curve"]
    assert seconds_to(curve, 3.5) == 10.0
    assert seconds_to(curve, 1.5) == pytest.approx(25.0)
    assert seconds_to(curve, 0.5) is None


def test_the_table_shows_the_best_rate_of_each_arm_and_when_it_passes_ddp():
    rows = rows_of(
        [
            line("pairs", [2.0, 1.0], rate=0.02),
            line("pairs", [1.0, 0.5], rate=0.01),
            line("pairs", [2.0, 0.9], rate=0.01, seed=1),
            line("ddp", [3.0, 1.5], accumulate=4),
            line("ddp", [3.0, 2.5], accumulate=1),
            line("diloco", [3.0, 2.0], outer=1.25),
        ]
    )
    shown = {row["arm"]: row for row in rows}
    assert (shown["pairs"]["rate"], shown["pairs"]["seeds"]) == (0.01, 2)
    assert shown["pairs"]["of the mean"] == pytest.approx(0.7)
    assert shown["pairs"]["own loss"] == pytest.approx(0.8)
    assert shown["pairs"]["s to DDP's end"] == pytest.approx((10.0 + (10 + 10 * 0.5 / 1.1)) / 2)
    assert shown["ddp"]["s to DDP's end"] == 20.0
    assert shown["diloco"]["of the mean"] == 1.25


def test_the_goals_are_to_be_ahead_of_all_and_soon_where_ddp_ends():
    lines = [
        line("pairs", [1.4, 1.2]),
        line("fragments", [1.5, 1.3]),
        line("ddp", [2.0, 1.4]),
        line("diloco", [2.0, 1.1]),
        line("alone", [1.0, 0.9]),
    ]
    ahead, soon = goals_of(rows_of(lines))
    assert (round(ahead.measured, 6), ahead.met) == (0.1, False)
    assert (round(soon.measured, 6), soon.met) == (2.0, False)
    wide = [{**each, "mbit_per_s": 1000.0} for each in lines if each["arm"] != "diloco"]
    (level,) = goals_of(rows_of(wide))
    assert level.met
    assert goals_of(rows_of(lines[:1])) == []


def test_no_ddp_no_time_to_its_end():
    assert rows_of([line("pairs", [2.0])])[0]["s to DDP's end"] is None


def test_each_look_tells_the_replicas_own_loss_and_that_of_their_mean(tmp_path):
    samples = []
    for host, value in enumerate((1.0, 3.0)):
        path = tmp_path / f"{host}.npy"
        np.save(path, np.full(4, value, np.float32))
        samples.append({"number": 1, "s": 5.0 + host, "kind": "replica", "path": str(path)})
    samples.append({**samples[1], "kind": "outer"})

    curve = curve_of(samples, lambda weights_P: float((weights_P**2).mean()))
    assert curve == [{"s": 5.5, "own": 5.0, "mean": 4.0, "outer": 9.0}]


def test_the_outer_step_is_torchs_nesterov():
    slow_P, momentum_P = torch.ones(5), torch.zeros(5)
    weights = torch.nn.Parameter(torch.ones(5))
    sgd = torch.optim.SGD([weights], lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    for number in range(3):
        delta_P = torch.linspace(-1, 1, 5) + number
        weights.grad = delta_P.clone()
        sgd.step()
        outer_step(slow_P, momentum_P, delta_P)
    torch.testing.assert_close(slow_P, weights.detach())


def test_no_arm_at_once_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path), "--at-once", "0"])
    assert ended.value.code == 2
    assert "at least one arm" in capsys.readouterr().err


def test_a_key_that_sync_has_not_is_refused_before_anything_runs(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path), "--arms", "pairs", "--sync", "inner_step=4"])
    assert ended.value.code == 2
    assert "inner_step" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
def test_real_daemons_and_ddp_train_on_real_lines(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--arms", "pairs", "ddp-bf16", "--lines", "100"]
    arguments += ["--seconds", "10", "--samples", "2"]
    main(arguments)
    lines = list(read_results(tmp_path))
    assert {each["arm"] for each in lines} == {"pairs", "ddp-bf16"}
    for each in lines:
        assert all(math.isfinite(point["mean"]) for point in each["curve"])
        assert each["curve"]
        assert max(each["head_start_steps"]) <= 1
        assert each["router"]["sent_mbytes"] > 0
    assert (tmp_path / "results.jsonl").read_text().count("\n") == 2
    main(arguments)  # makes nothing anew
    assert [json.dumps(each) for each in read_results(tmp_path)] == [json.dumps(e) for e in lines]
    assert "pairs" in capsys.readouterr().out
