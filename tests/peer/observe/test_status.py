"""The status, as programs and people read it."""

import io
import json
from dataclasses import replace

import pytest
from existing import existing
from rich.console import Console

from peer.facts import RECENT_ROUNDS, MicrobatchTime, PeerState, PipelineFacts, ReachFacts
from peer.observe.experts import matrix_lines
from peer.observe.problems import PeerProblem
from peer.observe.status import (
    Outcomes,
    PeerStatus,
    Status,
    health_of,
    progress_line,
    render,
)
from protocol.membership.dial_back import NatKind, Reach
from protocol.names import duration
from protocol.outcomes import SkipReason
from protocol.routing.measures import LinkTimes

PIPELINE = PipelineFacts(
    snapshot="ab" * 16,
    plan="cd" * 16,
    planned_s=1.25,
    iteration_s=1.5,
    spent_s={
        MicrobatchTime.COMPUTING: 1.0,
        MicrobatchTime.SENDING: 2.0,
        MicrobatchTime.WAITING: 1.0,
    },
    links=(LinkTimes("12D3KooWdddddddd", 40_000, 2_500, 0),),
    paths=("1:dddddddd", "1:dddddddd"),
    replicas_apart=0.025,
).to_json()
AMENDED = (
    {
        "version": 1,
        "round": 14,
        "step": 280,
        "changes": {"optimizer.learning_rate": 0.001, "training.total_steps": 2000},
    },
)
REACH = ReachFacts(
    reach=Reach.NO, v4=Reach.NO, nat=NatKind.CONE, relays=("12D3KooWcccccccc",), relayed_peers=1
).to_json()
SUCCESSOR = {"run_id": "cd" * 16, "address": "/ip4/8.8.8.8/tcp/1"}
FULL = Status(
    peer_id="12D3KooWaaaaaaaabbbbbbbb",
    run_id="ab" * 16,
    state=PeerState.TRAINING,
    round=3,
    step=160,
    total_steps=1600,
    learning_rate=0.0123456,
    tokens_per_s=2900.4,
    swarm_tokens_per_s=8400.0,
    left_s=372.0,
    chosen_inner_steps=12,
    tokens=1_234_567,
    train_loss=2.5,
    validation_loss=2.25,
    replica_loss=2.3125,
    outcomes=Outcomes(2, {SkipReason.DEADLINE: 1, SkipReason.NO_PARTNER: 0}, 0.75),
    peers=(
        PeerStatus("12D3KooWcccccccc", PeerState.DOWNLOADING),
        PeerStatus(
            "12D3KooWdddddddd",
            PeerState.TRAINING,
            round=7,
            rtt_s=0.0125,
            step=4171,
            validation_loss=2.5,
            averages=12,
            average_s=0.25,
        ),
    ),
    metrics="http://127.0.0.1:1/metrics",
    part="stage/1",
    microbatches={"done": 120, "lost": 2},
    pipeline=PIPELINE,
    amendments=AMENDED,
    successor=SUCCESSOR,
    ranks=2,
    codec="int8: daemon compiled, trainer plain: ImportError: no numba",
    reach=REACH,
    address="/ip4/192.168.1.5/tcp/1/p2p/12D3KooWaaaaaaaabbbbbbbb",
    address_from="RunPod's environment",
    reachable_from="this network",
    doing="training [round 3]",
    since_s=12.4,
    problems=(PeerProblem("alone", "no other peer", "troubleshooting.md#alone"),),
    up_s=7200.0,
    price_per_hour=0.4,
    seconds={"train": 7000.0, "exchange": 12.0},
)


def test_json_has_exactly_these_keys() -> None:
    assert FULL.to_json() == {
        "peer_id": "12D3KooWaaaaaaaabbbbbbbb",
        "run_id": "ab" * 16,
        "state": "training",
        "round": 3,
        "step": 160,
        "total_steps": 1600,
        "learning_rate": 0.0123456,
        "tokens_per_s": 2900.4,
        "swarm_tokens_per_s": 8400.0,
        "left_s": 372.0,
        "chosen_inner_steps": 12,
        "tokens": 1_234_567,
        "train_loss": 2.5,
        "validation_loss": 2.25,
        "replica_loss": 2.3125,
        "outcomes": {"averaged": 2, "skipped": {"deadline": 1}, "recent_share": 0.75},
        "peers": [
            {
                "peer_id": "12D3KooWcccccccc",
                "state": "downloading",
                "round": None,
                "rtt_s": None,
                "step": None,
                "validation_loss": None,
                "averages": 0,
                "average_s": None,
            },
            {
                "peer_id": "12D3KooWdddddddd",
                "state": "training",
                "round": 7,
                "rtt_s": 0.0125,
                "step": 4171,
                "validation_loss": 2.5,
                "averages": 12,
                "average_s": 0.25,
            },
        ],
        "metrics": "http://127.0.0.1:1/metrics",
        "part": "stage/1",
        "expert": None,
        "experts": [],
        "matrix": None,
        "microbatches": {"done": 120, "lost": 2},
        "pipeline": PIPELINE,
        "amendments": list(AMENDED),
        "successor": SUCCESSOR,
        "ranks": 2,
        "codec": "int8: daemon compiled, trainer plain: ImportError: no numba",
        "reach": REACH,
        "address": "/ip4/192.168.1.5/tcp/1/p2p/12D3KooWaaaaaaaabbbbbbbb",
        "address_from": "RunPod's environment",
        "reachable_from": "this network",
        "doing": "training [round 3]",
        "since_s": 12.4,
        "problems": [
            {"name": "alone", "words": "no other peer", "help": "troubleshooting.md#alone"}
        ],
        "up_s": 7200.0,
        "price_per_hour": 0.4,
        "seconds": {"train": 7000.0, "exchange": 12.0},
    }


def test_unknown_is_null() -> None:
    tree = json.loads(json.dumps(Status().to_json()))
    assert tree["state"] == "starting"
    assert tree["outcomes"] == {"averaged": 0, "skipped": {}, "recent_share": None}
    unknown = set(tree) - {
        "state",
        "outcomes",
        "peers",
        "experts",
        "microbatches",
        "amendments",
        "problems",
        "seconds",
    }
    assert all(tree[name] is None for name in unknown)


def test_a_loss_that_is_no_number_is_unknown() -> None:
    tree = Status(train_loss=float("nan"), validation_loss=float("inf")).to_json()
    assert (tree["train_loss"], tree["validation_loss"]) == (None, None)


def test_json_comes_back() -> None:
    for status in (FULL, Status()):
        tree = json.loads(json.dumps(status.to_json()))
        assert Status.from_json(tree).to_json() == status.to_json()


def test_people_see_a_table() -> None:
    stream = io.StringIO()
    Console(file=stream, width=130).print(render(FULL))
    text = stream.getvalue()
    for part in (
        "training [round 3] (12 s)",
        "1,234,567",
        "step 160 of 1,600 (10%), 2,900 tokens/s (swarm 8,400), 6 min left, 2 peers",
        "learning rate 0.0123",
        "3  inner steps 12 (auto)",
        "deadline 1",
        f"75% of the last {RECENT_ROUNDS} averaged",
        "dddddddd",
        "4,171",  # of the other peer: its rounds have numbers of their own
        "12.5 ms",
        "2.2500",
        "before the mean 2.3125",
        "trainer plain: ImportError: no numba",
        "no other peer (docs/troubleshooting.md#alone)",
        "1.50 s, planned 1.25 s (plan cdcdcdcd)",
        "computing 25%, sending 50%, waiting 25%",
        "1:dddddddd (2x)",
        "dddddddd 40.0 + 2.5 ms",
        "no (IPv4 no, IPv6 unknown; router: cone); relayed by cccccccc; 1 peers through relays",
        "0.80 so far, 0.84 at the end of the run (0.4 an hour)",
        "http://127.0.0.1:1/  (in a terminal: loco-peer top)",
        "2.50% apart at the last average in this stage",
        f"{'cd' * 16}, at /ip4/8.8.8.8/tcp/1",
        "1, from round 14 (step 280) on: optimizer.learning_rate = 0.001",
        "bbbbbbbb  (RunPod's environment; only reachable from this network)",
    ):
        assert part in text
    assert "no_partner" not in text
    narrow = io.StringIO()
    Console(file=narrow, width=40).print(render(FULL))
    joined = "".join(narrow.getvalue().split())
    assert existing(FULL.address) in joined, "nothing is cut off"
    assert "12D3KooWdddddddd" not in text


def test_people_see_whole_ids_who_ask_for_them() -> None:
    stream = io.StringIO()
    Console(file=stream, width=200).print(render(FULL, full_ids=True))
    assert "12D3KooWdddddddd" in stream.getvalue()


def test_an_address_for_everybody_has_no_note() -> None:
    stream = io.StringIO()
    anywhere = Status(address="/ip4/8.8.8.8/tcp/1", reachable_from="anywhere")
    Console(file=stream, width=100).print(render(anywhere))
    assert "/ip4/8.8.8.8/tcp/1" in stream.getvalue()
    assert "only reachable" not in stream.getvalue()


def test_a_table_of_nothing_known() -> None:
    stream = io.StringIO()
    Console(file=stream, width=100).print(render(Status()))
    assert "starting" in stream.getvalue()
    assert "%" not in stream.getvalue()
    assert "inner steps" not in stream.getvalue()  # which a run says that does not leave it open


# --- alive, or at work ----------------------------------------------------------------------------

ALONE = replace(FULL, peers=())


@pytest.mark.parametrize(
    ("status", "founder", "works", "sentence"),
    [
        (FULL, False, True, "works: training: training [round 3] (12 s), other peers: 2"),
        (ALONE, True, True, "works: training: training [round 3] (12 s), other peers: 0"),
        (ALONE, False, False, "alive, but it trains alone, and others of its run are not linked"),
        (replace(ALONE, state=PeerState.DOWNLOADING), False, True, "works: downloading"),
        (replace(ALONE, state=PeerState.FINISHED), False, True, "works: finished"),
        (replace(FULL, state=PeerState.PAUSED), False, True, "works: paused"),
        *(
            (replace(ALONE, state=state, doing="asking 192.0.2.1"), True, False, sentence)
            for state in (PeerState.CONNECTING, PeerState.RETURNING)
            for sentence in ["alive, but it has not found its run: asking 192.0.2.1 (12 s)"]
        ),
    ],
)
def test_a_peer_that_is_alive_may_not_work(
    status: Status, founder: bool, works: bool, sentence: str
) -> None:
    found, told = health_of(status, founder=founder)
    assert found == works
    assert told.startswith(sentence)


# --- the line that says how far the run is --------------------------------------------------------

TRAINS = Status(
    state=PeerState.TRAINING,
    step=110,
    total_steps=1200,
    tokens_per_s=2900.0,
    swarm_tokens_per_s=8400.0,
    left_s=372.0,
    train_loss=2.314,
    peers=tuple(PeerStatus(name, PeerState.TRAINING) for name in "abc"),
)


def test_the_line_says_how_far_the_run_is() -> None:
    assert progress_line(TRAINS, losses=True) == (
        "step 110 of 1,200 (9%), loss 2.31, 2,900 tokens/s (swarm 8,400), 6 min left, 4 peers"
    )


def test_what_is_unknown_is_left_out() -> None:
    stage = Status(step=110, total_steps=1200)
    assert progress_line(stage, losses=True) == "step 110 of 1,200 (9%), 1 peer"
    assert progress_line(Status(), losses=True) == "step -, 1 peer"


def test_the_held_out_loss_stands_beside() -> None:
    assert "loss 2.31 (held out 2.40)," in progress_line(
        replace(TRAINS, validation_loss=2.4), losses=True
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2.0 h"), (172_800, "2.0 days")],
)
def test_durations_are_short(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_advice_says_the_command() -> None:
    row = [1.0, 1.0]
    told = {"names": ["a", "b"], "losses": [row, row], "together": row, "gains": [None, 1e-15]}
    *_, advice, command = matrix_lines({**told, "advice": ["a", "b"]})
    assert advice.startswith("steps would pay more with b than with a")
    assert command == "  more training.total_steps of b, then: loco-peer amend RUN.toml"
