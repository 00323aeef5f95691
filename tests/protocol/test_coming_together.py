"""With fragments, peers that are rounds apart come together again, wherever they are."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from protocol.diloco.peers import LATE_ROUNDS
from protocol.schedule.rounds import Quotas, catch_up, is_left_behind, next_round, owed_steps

H = 8
MOST_APART = 20


@dataclass
class Trainer:
    """A peer that trains without waiting for any other; a tick is a step of a peer of speed 1."""

    round: int
    speed: int
    quota: int = H
    done: float = 0.0
    quotas: Quotas = field(default_factory=Quotas)

    @property
    def place(self) -> float:
        return H * (self.round + min(1.0, self.done / self.quota))

    def open(self, round_: int, others: list["Trainer"]) -> None:
        self.round, self.done = round_, 0.0
        owed = owed_steps(H, self.speed, [self.speed, *(each.speed for each in others)])
        self.quota = self.quotas.next(
            catch_up(owed, self.round * H, [each.place for each in others], H)
        )

    def tick(self, others: list["Trainer"]) -> None:
        self.done += self.speed
        rounds = [each.round for each in others]
        if self.done >= self.quota or is_left_behind(self.round, rounds):
            self.open(next_round(self.round, rounds), others)


@given(
    st.lists(
        st.tuples(st.integers(0, MOST_APART), st.sampled_from([1, 1, 1, 2, 4])),
        min_size=2,
        max_size=7,
    )
)
def test_in_twice_as_many_rounds_as_they_are_apart_all_average_again(at) -> None:
    """Before those ahead waited, one in front of three trained alone until the end of the run."""
    swarm = [Trainer(round_, speed) for round_, speed in at]
    others = {id(one): [each for each in swarm if each is not one] for one in swarm}
    first = max(round_ for round_, _ in at) - min(round_ for round_, _ in at)
    for one in swarm:
        one.open(one.round, others[id(one)])
    for _ in range(H * (2 * first + 4)):
        for one in swarm:
            one.tick(others[id(one)])
    rounds = [each.round for each in swarm]
    assert max(rounds) - min(rounds) < LATE_ROUNDS, rounds
