"""Which expert a peer trains: the rules, and a swarm under churn that spends its budgets evenly."""

import math
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.run.assignment import (
    CROWDED_S,
    EMPTY_S,
    Balance,
    ExpertTrainer,
    Move,
    expert_loads,
    expert_need,
    placed,
)

ALL = frozenset(range(6))


def trainers_of(*experts, speed=1.0, fits=ALL):
    return {f"peer{n}": ExpertTrainer(speed, fits, expert) for n, expert in enumerate(experts)}


def test_the_load_is_the_time_that_is_left():
    trainers = [
        ExpertTrainer(2.0, ALL, 0),
        ExpertTrainer(1.0, ALL, 0),
        ExpertTrainer(5.0, ALL, None),
    ]
    assert expert_loads([6.0, 4.0, 0.0], trainers) == [2.0, math.inf, 0.0]


def test_a_newcomer_takes_the_largest_load_that_fits():
    trainers = {**trainers_of(0, 1, 1), "new": ExpertTrainer(1.0, frozenset({0, 1}))}
    assert placed(trainers, [10.0, 30.0, 90.0]) == {"new": 1}
    assert placed(trainers, [20.0, 30.0, 90.0]) == {"new": 0}
    trainers["new"] = ExpertTrainer(1.0, ALL)
    assert placed(trainers, [10.0, 30.0, 90.0]) == {"new": 2}
    assert placed(trainers, [10.0, 30.0, 0.0]) == {"new": 1}


def test_of_experts_that_nobody_trains_the_largest_is_taken_and_of_equals_not_always_the_same():
    assert placed({"new": ExpertTrainer(1.0, ALL)}, [3.0, 5.0, 4.0]) == {"new": 1}
    alone = [
        placed({f"peer{n}": ExpertTrainer(1.0, ALL)}, [1.0] * 3)[f"peer{n}"] for n in range(20)
    ]
    assert set(alone) == {0, 1, 2}


def test_a_machine_that_holds_no_expert_is_given_none():
    assert placed({"new": ExpertTrainer(1.0, frozenset())}, [1.0]) == {}
    assert placed({"new": ExpertTrainer(1.0, frozenset({1}))}, [1.0, 0.0]) == {}


def test_peers_at_the_branch_part_as_all_of_them_foresee():
    """Twelve equal machines on budgets of 1, 2 and 3 twelfths, twice."""
    trainers = trainers_of(*[None] * 12)
    places = placed(trainers, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0])
    counts = [list(places.values()).count(expert) for expert in range(6)]
    assert counts == [1, 1, 2, 2, 3, 3]
    assert placed(dict(reversed(trainers.items())), [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]) == places


@pytest.mark.parametrize(
    ("experts", "flops_left", "move"),
    [
        ((0, 0, 1, 1), (10.0, 10.0), None),
        ((0, 0, 0, 1), (10.0, 10.0), Move(0, 1)),
        ((0, 0, 1), (10.0, 10.0), None),  # it would be no better
        ((0, 0, 1), (10.0, 25.0), Move(0, 1)),
        ((0, 0), (10.0, 1.0), Move(0, 1)),  # nobody trains it
        ((0, 1), (10.0, 1.0, 5.0), None),  # the last peer stays
        ((0, 0, 1), (10.0, 0.0), None),  # its budget is spent
    ],
)
def test_a_move_leaves_no_expert_worse_off_than_it_finds_one(experts, flops_left, move):
    found = expert_need(trainers_of(*experts), flops_left)
    assert (found and found[0]) == move


def test_pinned_peers_and_those_that_do_not_fit_stay():
    trainers = trainers_of(0, 0, 0, 1)
    trainers["peer0"] = replace(trainers["peer0"], pinned=True)
    trainers["peer1"] = replace(trainers["peer1"], fits=frozenset({0}))
    assert expert_need(trainers, [10.0, 10.0]) == (Move(0, 1), ["peer2"], False)
    trainers["peer2"] = replace(trainers["peer2"], pinned=True)
    assert expert_need(trainers, [10.0, 10.0]) is None


machines = st.builds(
    ExpertTrainer,
    speed=st.floats(0.1, 10),
    fits=st.sets(st.integers(0, 2), min_size=1).map(frozenset),
    expert=st.integers(0, 2),
)


@settings(max_examples=50)
@given(
    st.lists(machines, min_size=1, max_size=8),
    st.lists(st.just(0.0) | st.floats(1, 100), min_size=3, max_size=3),  # whole steps are left
)
def test_moves_come_to_an_end_and_each_lowers_the_largest_load_that_it_touches(found, flops_left):
    trainers = {f"peer{n}": trainer for n, trainer in enumerate(found)}
    for _ in range(3 ** len(trainers)):
        needed = expert_need(trainers, flops_left)
        if needed is None:
            return
        (move, movers, _), before = needed, expert_loads(flops_left, trainers.values())
        mover = next(iter(movers))
        trainers[mover] = replace(trainers[mover], expert=move.target)
        after = expert_loads(flops_left, trainers.values())
        assert max(after[move.source], after[move.target]) < before[move.target]
    pytest.fail("moves go on for ever")


@pytest.mark.parametrize(
    ("experts", "flops_left", "wait_s"),
    [((0, 0, 0, 1), (10.0, 10.0), CROWDED_S), ((0, 0, 0), (10.0, 10.0), EMPTY_S)],
)
def test_peers_go_with_the_patience_of_stages_and_one_by_one(experts, flops_left, wait_s):
    trainers, due = trainers_of(*experts), []
    for peer_id in trainers:
        balance = Balance(peer_id)
        times = (
            s for s in range(1000) if balance.due_move(expert_need(trainers, flops_left), float(s))
        )
        due.append(next(times, None))
    assert sorted(s for s in due if s) == [wait_s, 2 * wait_s, 3 * wait_s]


# --- a swarm under churn --------------------------------------------------------------------------
TICK_S = 60.0
HOUR_S = 3600.0
CHURN = 0.1 / HOUR_S
"""Part of the peers that go in a second, each without a word; as many come."""
STATE_S = 120.0
"""To fetch data and state of an expert; nothing is trained meanwhile."""
CHECKPOINT_S = 600.0
BUDGETS = (12.0, 2.0, 4.0, 6.0, 8.0, 16.0)
"""The generalist's, half of it before the branch, and those of five others; scaled below."""


@dataclass
class Machine:
    trainer: ExpertTrainer
    balance: Balance
    ready_s: float = 0.0


@dataclass
class Swarm:
    """Real rules over machines that compute and nothing else; everybody's view is a tick old.

    Attributes:
        done: of each expert's budget, in FLOPs; what was lost is done anew.
        computed: by machines for each expert, whatever came of it.
        stood_s: longest time for which each expert had nobody, once it was open.
        could: FLOPs of all machines, from beginning to end.
    """

    draws: random.Random
    moves: bool = True
    now_s: float = 0.0
    machines: dict[str, Machine] = field(default_factory=dict)
    came: int = 0
    branched: bool = False
    could: float = 0.0

    def __post_init__(self):
        speed, hours = 24.0, 10.0
        self.budgets = [b / sum(BUDGETS) * speed * hours * HOUR_S for b in BUDGETS]
        self.done, self.saved, self.computed = [0.0] * 6, [0.0] * 6, [0.0] * 6
        self.stood_s, self.empty_s = [0.0] * 6, [0.0] * 6
        for _ in range(24):
            self.comes()
        pinned = self.machines["peer1"]
        pinned.trainer = replace(pinned.trainer, fits=ALL, expert=5, pinned=True)

    def comes(self):
        self.came += 1
        name = f"peer{self.came}"
        least = self.draws.choice((3, 5, *[6] * 6))  # some machines hold no large expert
        trainer = ExpertTrainer(self.draws.lognormvariate(-0.1, 0.5), frozenset(range(least)))
        self.machines[name] = Machine(trainer, Balance(name))

    @property
    def left(self):
        """What is open: before the branch, the first half of the generalist."""
        left = [max(0.0, b - d) for b, d in zip(self.budgets, self.done, strict=True)]
        return left if self.branched else [left[0] - self.budgets[0] / 2, *[0.0] * 5]

    def run(self):
        while not self.branched or any(self.left):
            seen = {name: machine.trainer for name, machine in self.machines.items()}
            left = self.left
            self.churn()
            self.trains()
            if not self.branched and self.left[0] <= 0:
                self.branched = True
                self.release(lambda trainer: not trainer.pinned)
            self.release(
                lambda trainer: trainer.expert is not None and not self.left[trainer.expert]
            )
            self.decide(seen, left)
            self.watch()
            self.now_s += TICK_S
            assert self.now_s < 40 * HOUR_S, "experts stand"

    def churn(self):
        for name in list(self.machines):
            if name != "peer1" and self.draws.random() < CHURN * TICK_S:
                self.goes(name)
                self.comes()

    def goes(self, name):
        expert = self.machines.pop(name).trainer.expert
        if expert is not None and expert not in self.trained:
            self.done[expert] = self.saved[expert]

    @property
    def trained(self):
        return {machine.trainer.expert for machine in self.machines.values()}

    def trains(self):
        for machine in self.machines.values():
            expert = machine.trainer.expert
            if expert is not None and self.now_s >= machine.ready_s and self.left[expert] > 0:
                flops = min(machine.trainer.speed * TICK_S, self.left[expert])
                self.done[expert] += flops
                self.computed[expert] += flops
        if self.now_s % CHECKPOINT_S == 0:
            self.saved = list(self.done)

    def release(self, wanted):
        for machine in self.machines.values():
            if wanted(machine.trainer):
                machine.trainer = replace(machine.trainer, expert=None)

    def decide(self, seen, left):
        """Each by what was there a tick ago, but for itself."""
        newcomers = {n: m.trainer for n, m in self.machines.items() if m.trainer.expert is None}
        for name, expert in placed({**seen, **newcomers}, self.left).items():
            if name in newcomers:
                self.goes_to(name, expert)
        if not self.moves:
            return
        for name, machine in self.machines.items():
            if name in seen and machine.trainer == seen[name]:
                move = machine.balance.due_move(expert_need(seen, left), self.now_s)
                if move is not None:
                    self.goes_to(name, move.target)

    def goes_to(self, name, expert):
        machine = self.machines[name]
        machine.trainer = replace(machine.trainer, expert=expert)
        machine.ready_s = self.now_s + STATE_S

    def watch(self):
        for expert, left in enumerate(self.left):
            is_empty = left > 0 and expert not in self.trained
            self.empty_s[expert] = self.empty_s[expert] + TICK_S if is_empty else 0.0
            self.stood_s[expert] = max(self.stood_s[expert], self.empty_s[expert])
        self.could += TICK_S * sum(machine.trainer.speed for machine in self.machines.values())


def shares(values):
    return [value / sum(values) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_expert_has_its_share_of_the_compute_whoever_comes_and_goes(seed):
    swarm = Swarm(random.Random(seed))
    swarm.run()
    assert swarm.came > 24 + 10, "there was no churn"
    assert shares(swarm.computed) == pytest.approx(shares(BUDGETS), rel=0.05)
    assert max(swarm.stood_s) <= 4 * TICK_S + 2 * EMPTY_S
    assert swarm.machines["peer1"].trainer.expert in (5, None)
    assert sum(swarm.computed) > 0.95 * swarm.could, "machines were where nothing was left to do"
