"""The points of a run that curves are drawn from."""

from peer.observe.history import SAMPLE_EVERY_S, History
from peer.observe.status import Outcomes, PeerStatus, Status
from peer.runtime import NetworkStatistics

PEERS = (
    PeerStatus("b", "training", validation_loss=3.0),
    PeerStatus("c", "training", validation_loss=5.0),
    PeerStatus("d", "downloading"),
)
NOTHING = NetworkStatistics({}, {})
COLUMNS = (
    "up_s",
    "step",
    "train_loss",
    "validation_loss",
    "peers_loss",
    "best_loss",
    "worst_loss",
    "tokens_per_s",
    "swarm_tokens_per_s",
    "sent_bytes_per_s",
    "received_bytes_per_s",
    "averaged_share",
    "peers",
)


def note(history: History, count: int, **known) -> None:
    for number in range(count):
        history.note(Status(up_s=2.0 * number, step=number, **known), NOTHING)


def test_a_sample_is_a_point_with_the_losses_of_all_that_tell_theirs():
    history = History()
    outcomes = Outcomes(3, {}, 0.75)
    history.note(Status(up_s=1.0, validation_loss=1.0, peers=PEERS, outcomes=outcomes), NOTHING)
    told = history.to_json()
    assert set(told) == {"every_s", *COLUMNS}
    assert (told["peers_loss"], told["best_loss"], told["worst_loss"]) == ([3.0], [1.0], [5.0])
    assert (told["peers"], told["averaged_share"], told["tokens_per_s"]) == ([3], [0.75], [None])
    assert told["every_s"] == SAMPLE_EVERY_S


def test_before_the_first_sample_all_columns_are_empty():
    assert History().to_json() == {"every_s": SAMPLE_EVERY_S, **{name: [] for name in COLUMNS}}


def test_two_points_become_one_when_they_are_too_many():
    history = History(most_points=4)
    note(history, 9)
    told = history.to_json()
    # Four samples make two points, four more two again, which make one each; then one is begun.
    assert told["step"] == [1.5, 5.5, 8.0]
    assert told["up_s"] == [3.0, 11.0, 16.0]
    assert told["every_s"] == 4 * SAMPLE_EVERY_S


def test_what_is_not_known_does_not_count_in_a_point():
    history = History(most_points=2)
    for loss in (None, 2.0, float("nan"), 4.0):
        history.note(Status(train_loss=loss), NOTHING)
    assert history.to_json()["train_loss"] == [3.0]


def test_bytes_are_told_as_a_rate():
    history = History()
    for seconds, carried in ((1.0, 100), (3.0, 500), (3.0, 600)):
        sent = NetworkStatistics({"a": carried, "b": carried}, {"a": carried // 100})
        history.note(Status(up_s=seconds), sent)
    told = history.to_json()
    assert told["sent_bytes_per_s"] == [None, 400.0, None]
    assert told["received_bytes_per_s"] == [None, 2.0, None]


def test_a_month_stays_bounded_and_keeps_its_beginning():
    history = History(most_points=20)
    note(history, 30_000)
    told = history.to_json()
    assert 10 <= len(told["step"]) <= 20
    assert told["step"][0] < 30_000 / 10
    assert told["step"] == sorted(told["step"])
