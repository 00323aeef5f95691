"""A peer's numbers count in the middle of all when it has beaten for a while."""

from protocol.membership.view import (
    BEATS,
    TRUSTED_AFTER_S,
    Progress,
    Roster,
    known_positions,
    trusted,
)

SILENCE_S = 10.0
TRAINING = Progress("training", step=100)


def names(roster: Roster, now_s: float) -> list[str]:
    return [member.peer_id for member in trusted(roster.alive(now_s), now_s)]


def beat(roster: Roster, peer_id: str, *times_s: float, life: int = 1) -> None:
    for now_s in times_s:
        roster.heartbeat(now_s, peer_id, life, TRAINING)


def test_where_nobody_has_beaten_for_long_all_count():
    roster = Roster(SILENCE_S)
    roster.heard(0.0, "a", 1, progress=TRAINING)
    beat(roster, "b", 0.0)
    assert names(roster, 0.0) == ["a", "b"]


def test_beats_count_and_greetings_do_not():
    roster = Roster(SILENCE_S)
    times_s = [float(second) for second in range(int(TRUSTED_AFTER_S) + 1)]
    beat(roster, "a", *times_s)
    for now_s in times_s:
        roster.heard(now_s, "b", 1, progress=TRAINING)
    assert names(roster, TRUSTED_AFTER_S - 0.1) == ["a", "b"]
    assert names(roster, TRUSTED_AFTER_S) == ["a"]


def test_many_beats_at_once_are_not_a_while_and_few_are_not_many():
    roster = Roster(SILENCE_S)
    beat(roster, "a", *[float(second) for second in range(9)])
    beat(roster, "b", *[8.0] * 20)
    beat(roster, "c", *[8.0 * share / (BEATS - 2) for share in range(BEATS - 1)])
    assert names(roster, 8.0) == ["a"]
    beat(roster, "c", 8.1)
    assert names(roster, 8.1) == ["a", "c"]
    assert names(roster, 8.0 + TRUSTED_AFTER_S) == ["a", "b", "c"]


def test_all_of_one_network_have_one_voice_and_those_beside_us_one_each():
    roster, seconds = Roster(SILENCE_S), range(int(TRUSTED_AFTER_S) + 1)
    told = {f"sybil {number}": Progress("training", step=10**6 + number) for number in range(9)}
    told |= {name: Progress("training", step=100) for name in ("a", "b", "near", "too")}
    networks = {"a": "1.2.3.0/24", "b": "1.2.4.0/24"} | {
        peer_id: "5.6.7.0/24" for peer_id in told if peer_id.startswith("sybil")
    }
    for now_s in map(float, seconds):
        for peer_id, progress in told.items():
            roster.heard(now_s, peer_id, 1, network=networks.get(peer_id))
            roster.heartbeat(now_s, peer_id, 1, progress)
    voices = trusted(roster.alive(TRUSTED_AFTER_S), TRUSTED_AFTER_S)
    assert sorted(voice.progress.step for voice in voices) == [100] * 4 + [10**6 + 4]


def test_another_life_begins_anew():
    roster = Roster(SILENCE_S)
    for peer_id in "ab":
        beat(roster, peer_id, *[float(second) for second in range(9)])
    beat(roster, "b", 9.0, life=2)
    assert names(roster, 9.0) == ["a"]


def test_who_has_just_come_says_nothing_of_where_in_the_data_all_are():
    roster = Roster(SILENCE_S)
    for peer_id, position in (("new", 0), ("a", 70), ("b", 90)):
        roster.heartbeat(0.0, peer_id, 1, Progress("training", epoch=0, position=position))
    assert known_positions(roster.alive(0.0), 0.0) == [(0, 70), (0, 90)]
