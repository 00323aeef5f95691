"""Groups: one spelling for each part, one digest for each group."""

import dataclasses
from typing import Any

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError
from protocol.membership.group import KINDS, WHOLE_MODEL, Group, other_group_sentence

RUN, OTHER_RUN = "ab" * 16, "cd" * 16

run_ids = st.text("0123456789abcdef", min_size=32, max_size=64)
parts = st.one_of(
    st.just(WHOLE_MODEL), st.builds("{}/{}".format, st.sampled_from(KINDS), st.integers(0, 99999))
)
groups = st.builds(Group, run_ids, parts)


def test_a_peer_holds_the_whole_model_unless_a_part_is_named():
    assert Group(RUN) == Group(RUN, "model")


def test_the_digest_is_the_one_that_other_releases_compute():
    encoded = b"loco/v1/group\0" + RUN.encode() + b"\0stage/2"
    assert Group(RUN, "stage/2").digest == blake3.blake3(encoded).hexdigest()[:32]


@given(groups, groups)
def test_groups_are_equal_exactly_when_their_digests_are(one, other):
    assert (one == other) is (one.digest == other.digest)


def test_run_kind_and_number_each_make_another_group():
    named = [
        Group(run, part)
        for run in (RUN, OTHER_RUN, RUN * 2)
        for part in ("model", "stage/0", "stage/1", "stage/10", "expert/1", "fragment/1")
    ]
    assert len({group.digest for group in named}) == len(named)


@pytest.mark.parametrize(
    "part",
    [
        "",
        "Model",
        "model/0",
        "stage",
        "stage/",
        "stage/01",
        "stage/-1",
        "stage/100000",
        "stage/1/2",
        "stage/1\n",
        "stage/\u0661",  # a digit, but not ours
        "layer/1",
        " stage/1",
        "stage/1\0",
    ],
)
def test_a_part_has_one_spelling(part):
    with pytest.raises(LocalProtocolError, match="no part of a model: use 'model'"):
        Group(RUN, part)


@pytest.mark.parametrize("run_id", ["", "ab", "AB" * 16, "ab" * 33, "g" * 32, "ab" * 16 + "\n"])
def test_a_run_id_is_a_digest(run_id):
    with pytest.raises(LocalProtocolError, match="no run id"):
        Group(run_id)


def test_a_group_does_not_change():
    group: Any = Group(RUN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.part = "stage/1"


def test_the_refusal_names_both_groups():
    sentence = other_group_sentence(Group(RUN).digest, Group(RUN, "stage/0").digest)
    assert Group(RUN).digest in sentence
    assert Group(RUN, "stage/0").digest in sentence
    assert sentence.isprintable()
