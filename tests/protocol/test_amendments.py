"""Amendments: what may change in a run that is under way, and which spec is in force where."""

import itertools
import tomllib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.admission.statements import seal
from protocol.errors import InvalidRunSpec, RemoteProtocolError
from protocol.limits import MAX_AMENDMENTS
from protocol.run.amendments import (
    LEARNING_RATE,
    MODE,
    TOTAL_STEPS,
    AmendedSpec,
    Amendment,
    changed,
    changes_between,
    is_amendment,
    new_peers,
    spec_at,
    values_of,
)
from protocol.run.run_spec import RunSpec, SyncSection, TrainingSection, parse_toml

H = 10
RUN = "ab" * 16
FOUNDER, OTHER = (Ed25519PrivateKey.from_private_bytes(byte * 32) for byte in (b"f", b"o"))
KEY = FOUNDER.public_key().public_bytes_raw()
SPEC = RunSpec(training=TrainingSection(total_steps=20 * H), sync=SyncSection(inner_steps=H))
PEERS = (
    "12D3KooWEC9aiTnm17ZpGvxQDHoxnTyZ8LecyEC3QhcfNr3Qs4Ur",
    "12D3KooWDWRun9zpNhZuXDrEaT1QdrqpXVVz4eXuFD41eVaM3Foz",
)


def amendment(version, from_round, signer=FOUNDER, run=RUN, **changes):
    keys = {"steps": TOTAL_STEPS, "rate": LEARNING_RATE, "mode": MODE}
    pairs = tuple(sorted((keys[name], value) for name, value in changes.items()))
    key = signer.public_key().public_bytes_raw()
    return Amendment.made(run, version, from_round, pairs, key, signer.sign)


def amended(*amendments):
    spec = AmendedSpec(SPEC, RUN, KEY)
    for each in amendments:
        spec.take(each.sealed)
    return spec


# --- which spec is in force ---------------------------------------------------------------------


def test_an_amendment_is_in_force_from_its_round_on():
    spec = amended(amendment(1, 7, steps=300, rate=0.5))
    assert spec.at_round(6) == SPEC
    assert spec.at_round(7).total_rounds == 30
    assert spec.at_round(7).optimizer.learning_rate == 0.5
    assert spec.at_step(69.9) == SPEC
    assert spec.at_step(70.0 - 1e-9) == spec.at_step(70.0) == spec.last
    assert (spec.total_steps_at(69), spec.total_steps_at(70)) == (200, 300)


def test_the_later_version_wins_key_by_key_in_whatever_order_they_come():
    made = (
        amendment(1, 5, rate=0.1, steps=300),
        amendment(2, 9, steps=250),
        amendment(3, 4, rate=0.2),
    )
    for order in itertools.permutations(made):
        spec = amended(*order)
        assert spec.amendments == made
        found = [
            (spec.at_round(r).optimizer.learning_rate, spec.at_round(r).total_rounds)
            for r in (3, 4, 5, 9)
        ]
        assert found == [(0.003, 20), (0.2, 20), (0.2, 30), (0.2, 25)]
        assert [spec.at_round(r) for r in range(12)] == [spec_at(SPEC, made, r) for r in range(12)]
        assert (spec.longest_rounds, spec.next_version) == (30, 4)


def test_of_two_with_one_version_all_peers_keep_the_same():
    one, other = amendment(1, 5, rate=0.1), amendment(1, 5, rate=0.2)
    first, second = amended(one, other), amended(other, one)
    assert first.amendments == second.amendments
    assert len(first.amendments) == 1


@pytest.mark.parametrize(
    ("made", "end"),
    [
        ((), 20),
        ((amendment(1, 7, steps=120),), 12),
        ((amendment(1, 7, steps=400),), 40),
        ((amendment(1, 20, steps=400),), 40),
        ((amendment(1, 21, steps=400),), 20),  # nobody comes there
        ((amendment(1, 7, steps=50),), 7),  # it ends where it hears of it
        ((amendment(1, 18, steps=400), amendment(2, 10, steps=150)), 15),
    ],
)
def test_where_the_run_ends(made, end):
    spec = amended(*made)
    assert spec.end_round == end
    trained = itertools.takewhile(lambda r: spec.at_round(r).total_rounds > r, itertools.count())
    assert len(list(trained)) == end


def test_the_last_round_follows_the_length_that_is_in_force_there():
    spec = amended(amendment(1, 12, steps=160))
    assert [r for r in range(30) if spec.is_last_round(r)] == [16]
    spec = amended(amendment(1, 20, steps=260))
    assert [r for r in range(30) if spec.is_last_round(r)] == [26]


# --- statements -----------------------------------------------------------------------------------


def test_only_the_founder_amends_and_only_this_run():
    spec = amended()
    for wrong in (
        amendment(1, 5, signer=OTHER, rate=0.1),
        amendment(1, 5, run="cd" * 16, rate=0.1),
        amendment(0, 5, rate=0.1),
        amendment(MAX_AMENDMENTS + 1, 5, rate=0.1),
        amendment(1, -1, rate=0.1),
    ):
        with pytest.raises(RemoteProtocolError):
            spec.take(wrong.sealed)
    forged = amendment(1, 5, rate=0.1).sealed.replace(KEY, OTHER.public_key().public_bytes_raw())
    with pytest.raises(RemoteProtocolError):
        spec.take(forged)
    assert spec.at_round(9) == SPEC
    assert spec.take(amendment(MAX_AMENDMENTS, 5, rate=0.1).sealed) is not None


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [["model.num_layers", 3]],
        [["training.total_steps", 0]],
        [["training.total_steps", True]],
        [["optimizer.learning_rate", float("nan")]],
        [["optimizer.learning_rate", "fast"]],
        [["admission.mode", "nobody"]],
        [["training.total_steps", 10], ["optimizer.learning_rate", 0.1]],
        [["training.total_steps", 10], ["training.total_steps", 20]],
        [["training.total_steps"]],
        ["training.total_steps"],
    ],
)
def test_changes_that_no_run_can_take_are_refused(pairs):
    sealed = seal(["amendment", RUN, 1, 5, pairs, KEY], FOUNDER.sign)
    assert is_amendment(sealed)
    with pytest.raises(RemoteProtocolError):
        amended().take(sealed)


def test_one_that_is_known_is_not_new():
    spec, made = amended(), amendment(1, 5, rate=0.1)
    assert spec.take(made.sealed) == made
    assert spec.take(made.sealed) is None
    assert Amendment.read(made.sealed, RUN, KEY, SPEC) == made


# --- what a user may change -----------------------------------------------------------------------


def wanted(text, tree):
    return values_of(parse_toml(text), tree)


def test_what_differs_is_found_and_what_is_left_out_stays():
    text = "[training]\ntotal_steps = 300\n[optimizer]\nlearning_rate = 0.003\n"
    tree = {"training": {"total_steps": 300}, "optimizer": {"learning_rate": 0.003}}
    values = wanted(text, tree)
    assert values == {TOTAL_STEPS: 300, LEARNING_RATE: 0.003}
    assert changes_between(SPEC, values) == ((TOTAL_STEPS, 300),)
    whole = values_of(SPEC, SPEC.model_dump(mode="json"))
    assert changes_between(SPEC, whole) == ()


def test_whatever_else_differs_is_refused_by_name():
    with pytest.raises(InvalidRunSpec, match=r"sync.inner_steps.*training.total_steps"):
        changes_between(SPEC, {"sync.inner_steps": 20, TOTAL_STEPS: 300})
    with pytest.raises(InvalidRunSpec, match=r"model.num_layers"):
        changed(SPEC, (("model.num_layers", 3),))
    with pytest.raises(InvalidRunSpec, match=r"learning_rate.*greater than 0"):
        changed(SPEC, ((LEARNING_RATE, -1.0),))


def test_the_list_of_peers_grows_and_never_shrinks():
    admission = SPEC.admission.model_copy(update={"mode": "list", "peers": PEERS[:1]})
    spec = SPEC.model_copy(update={"admission": admission})
    assert new_peers(spec, {"admission.peers": list(PEERS)}) == PEERS[1:]
    assert new_peers(spec, {}) == ()
    with pytest.raises(InvalidRunSpec, match=f"ban {PEERS[0]}"):
        new_peers(spec, {"admission.peers": []})
    opened = changed(spec, ((MODE, "open"),))
    assert opened.admission.mode == "open"


# --- experts --------------------------------------------------------------------------------------
OF_CODE = f"experts.a.code.{TOTAL_STEPS}"
OF_GENERAL = f"experts.general.{TOTAL_STEPS}"
EXPERTS = """
training.total_steps = 200
sync.inner_steps = 10
ensemble.branch_round = 4
[[experts]]
name = "general"
[[experts]]
name = "a.code"
source = "text:code"
training.total_steps = 300
"""
SEVERAL = parse_toml(EXPERTS)


def several(*changes):
    spec = AmendedSpec(SEVERAL, RUN, KEY)
    for version, (from_round, key, value) in enumerate(changes, 1):
        made = Amendment.made(RUN, version, from_round, ((key, value),), KEY, FOUNDER.sign)
        spec.take(made.sealed)
    return spec


def test_one_expert_is_amended_from_a_round_of_its_own_and_the_others_stay():
    spec = several((25, OF_CODE, 500))
    assert [each.total_rounds for each in spec.models] == [20, 50]
    general, code = spec.of_expert(0), spec.of_expert(1)
    assert (general.end_round, general.last) == (20, SEVERAL.of_expert(0))
    assert (code.at_round(24).total_rounds, code.at_round(25).total_rounds) == (30, 50)
    assert (code.end_round, code.is_last_round(50), code.longest_rounds) == (50, True, 50)
    heard = several()
    late = heard.of_expert(1)
    late.take(spec.amendments[0].sealed)
    assert late.at_round(25) == code.at_round(25)
    assert several((31, OF_CODE, 500)).models[1].total_rounds == 30, "nobody comes there"


def test_the_generalist_branches_where_it_would_have():
    founding = parse_toml(EXPERTS.replace("ensemble.branch_round = 4", ""))
    assert (founding.branch_round, changed(founding, ((OF_GENERAL, 400),)).branch_round) == (10, 10)
    with pytest.raises(InvalidRunSpec, match="branches at step 100"):
        changed(founding, ((OF_GENERAL, 90),))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (f"experts.a.cod.{TOTAL_STEPS}", 500, "did you mean 'a.code'"),
        (OF_CODE, 0, "greater than or equal to 1"),
        ("experts.a.code.model.num_layers", 2, "cannot be amended"),
    ],
)
def test_what_no_expert_can_take_is_refused_by_all(key, value, why):
    with pytest.raises(InvalidRunSpec, match=why):
        changed(SEVERAL, ((key, value),))
    with pytest.raises(RemoteProtocolError, match="cannot be used"):
        several((5, key, value))
    with pytest.raises(InvalidRunSpec, match="the run has no experts"):
        changed(SPEC, ((OF_CODE, 500),))


@pytest.mark.parametrize(
    "text",
    [
        EXPERTS.replace("300", "500"),
        '[[experts]]\nname = "a.code"\ntraining = { total_steps = 500 }',
    ],
)
def test_a_file_may_be_the_whole_run_spec_or_name_one_expert_alone(text):
    values = values_of(parse_toml(text, beside=SEVERAL), tomllib.loads(text))
    assert changes_between(SEVERAL, values) == ((OF_CODE, 500),)


def test_steps_of_the_whole_run_are_no_experts():
    with pytest.raises(InvalidRunSpec, match=f"each expert has its own; amend {OF_GENERAL}"):
        changes_between(SEVERAL, {TOTAL_STEPS: 500})
    with pytest.raises(InvalidRunSpec, match="no expert 'cod'"):
        parse_toml('[[experts]]\nname = "cod"', beside=SEVERAL)
