"""`loco-peer eval`: tables of claims, and claims that weights do not bear out."""

import json
import math
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_export_command import SPEC, home_of
from typer.testing import CliRunner

from peer.cli import evaluate
from peer.cli.app import app
from peer.cli.evaluate import (
    BEST,
    OURS,
    UNCHECKED,
    ExpertSaid,
    domains_of,
    lines_of,
    own_rule,
    said_of,
    show_evaluation,
)
from peer.cli.expert_check import verdict_on
from peer.observe.control import ControlFailed
from peer.options.exit_codes import ExitCode
from peer.state.home import Home
from protocol.errors import LocoError
from protocol.experts.ensemble import RUN, ensemble_log_probs, loss_of, rules_of
from protocol.run.run_spec import RunSpec, validated

CONTEXT = 8
STAMP = "ab" * 16


def spec_of(**ensemble: Any) -> RunSpec:
    return validated(
        {
            "model": {"context_length": CONTEXT},
            "experts": [{"name": "general"}, {"name": "code", "source": "text:code.txt"}],
            "ensemble": {"branch_round": 0, **ensemble},
        }
    )


def claims(seed: int, mean: float) -> np.ndarray:
    drawn = np.random.default_rng(seed).exponential(mean, 3 * CONTEXT)
    return -drawn.astype(np.float32)


def said(name: str, by_domain: dict[int, np.ndarray], **more: Any) -> ExpertSaid:
    stamps = dict.fromkeys(by_domain, STAMP)
    return ExpertSaid(name, "12D3KooWpeer", 7, by_domain, stamps, more.pop("check", OURS), **more)


BOTH = [
    said("general", {0: claims(1, 1.0), 1: claims(2, 2.0)}),
    said("code", {1: claims(3, 0.5)}, check=UNCHECKED),
]


def test_each_rule_is_what_one_process_computes_of_the_same_claims():
    general, code = domains_of(spec_of(anchor="general"), BOTH)
    assert (general.name, general.tokens, set(general.alone)) == ("general", 24, {"general"})
    assert set(code.alone) == {"general", "code"}
    blocks = np.stack([each.claims[1] for each in BOTH]).reshape(2, -1, CONTEXT)
    for name, rule in rules_of(own_rule(spec_of())).items():
        assert code.together[name] == loss_of(ensemble_log_probs(blocks, rule))
    assert code.alone["code"] == pytest.approx(-claims(3, 0.5).mean())


def test_without_an_anchor_the_generalist_is_left_out_and_so_is_a_liar():
    _, code = domains_of(spec_of(anchor="none"), BOTH)
    assert code.together[RUN] == pytest.approx(code.alone["code"])
    liar = said("code", {1: np.zeros(24, np.float32)}, believed=False)
    _, code = domains_of(spec_of(anchor="general"), [BOTH[0], liar])
    assert code.together[RUN] == pytest.approx(code.alone["general"])


def test_the_table_names_experts_rules_and_what_was_not_checked():
    lines = list(lines_of(BOTH, list(domains_of(spec_of(anchor="general"), BOTH))))
    names = [line[:12].strip() for line in lines]
    assert names[:4] == ["", "general", "code", BEST]
    assert {"mean", "leader", "posterior", RUN} <= set(names)
    assert lines[-2] == "general: peer KooWpeer, step 7: ours"
    assert lines[-1].endswith("not checked: its weights are not here; --check fetches them")


def test_a_claim_that_its_weights_do_not_bear_out_is_not_believed():
    honest, liar = BOTH[0], said("code", {0: np.zeros(24, np.float32)})
    true = claims(1, 1.0).reshape(3, CONTEXT)
    assert verdict_on(honest, STAMP, lambda d: (2, true[2]) if d == 0 else None, CONTEXT) == (
        True,
        "checked on a block of each of 1 domains",
    )
    assert verdict_on(liar, STAMP, lambda _: (2, true[2]), CONTEXT)[0] is False
    moved = verdict_on(liar, "cd" * 16, lambda _: (2, true[2]), CONTEXT)
    assert moved == (None, "not checked: its weights have moved on since it measured")


def told_by(reply: Any) -> Any:
    def told(home: Home, request: str, timeout_s: float = 0.0, **wanted: Any) -> Any:
        if request == "keep_together":
            return {}
        if isinstance(reply, LocoError):
            raise reply
        return reply

    return told


def test_an_expert_that_nobody_tells_of_is_named_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = ControlFailed("no peer that we see trains it")
    monkeypatch.setattr(evaluate, "ask_now", told_by(nobody))
    home = home_of(spec_of(), tmp_path)
    assert said_of(home, 1, "code").check == "nobody told: no peer that we see trains it"
    with pytest.raises(LocoError, match="no expert has measured a domain yet; try again"):
        show_evaluation(home, check=False, as_json=True)


def test_json_has_losses_by_expert_and_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = b64encode(claims(1, 1.0).astype("<f4").tobytes()).decode()
    claim = {"stamp": STAMP, "step": 7, "log_probs": values}
    reply = {"peer": "12D3KooWpeer", "own": True, "claims": {"0": claim}}
    monkeypatch.setattr(evaluate, "ask_now", told_by(reply))
    show_evaluation(home_of(spec_of(), tmp_path), check=False, as_json=True)
    tree = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in tree["experts"]] == ["general", "code"]
    (domain,) = tree["domains"]
    assert domain["alone"].keys() == {"general", "code"}
    assert math.isclose(domain["together"]["mean"], domain["alone"]["code"], rel_tol=1e-6)


@pytest.mark.parametrize("spec", [None, SPEC])
def test_a_home_without_experts_says_so(tmp_path: Path, spec: RunSpec | None) -> None:
    home = Home(tmp_path) if spec is None else home_of(spec, tmp_path)
    ran = CliRunner().invoke(app, ["eval", "--home", str(home.root)])
    assert ran.exit_code == ExitCode.USAGE
    assert "no experts" in ran.output + ran.stderr or "belongs to no run" in ran.stderr
