"""Pipelines of cores in which relays die, come back, and lose their trainers, all at random."""

from collections import Counter

from microbatch_worlds import MicrobatchWorld

from protocol.microbatch.core import MicrobatchEvent


class ChaosWorld(MicrobatchWorld):
    """A world with so many things going wrong.

    Args:
        troubles: deaths and restarts, in all.
        spare: whether every stage keeps a relay that lives.
    """

    def __init__(self, seed, troubles, *, spare=True, **sizes):
        super().__init__(seed, **sizes)
        self.troubles = troubles
        self.spare = spare
        self.seen_gone = set()
        self.all_nodes = list(self.nodes.values())

    def look_around(self):
        super().look_around()
        self.seen_gone = {name for name in self.relays if not self.nodes[name].alive}

    def hear_of_deaths(self):
        """A link that broke is heard of within an iteration."""
        if any(not self.nodes[name].alive for name in set(self.relays) - self.seen_gone):
            self.look_around()

    def run(self, iterations, bound=60_000):
        self.look_around()
        for name in self.origins:
            self.begin(name)
        for _ in range(bound):
            for name in self.origins:
                if not self.out[name] and self.begun[name] < iterations:
                    self.hear_of_deaths()
                    self.begin(name)
            if self.is_done(iterations):
                return True
            self._happen()
        return False

    def _happen(self):
        draw = self.random.random()
        if draw < 0.01 and self.troubles:
            self.troubles -= 1
            self._trouble()
        elif draw < 0.02:
            self.look_around()
        elif draw < 0.03 and self.seen_gone:
            name = self.random.choice(sorted(self.seen_gone))
            self.revive(name)
            self.all_nodes.append(self.nodes[name])
            self.look_around()
        elif self.todo:
            self.todo.pop(self.random.randrange(len(self.todo)))()
        else:
            self.now_s += 1.0
            self.look_around()

    def _trouble(self):
        name = self.random.choice([n for n in self.relays if self.nodes[n].alive] or [None])
        if name is None:
            return
        mates = [n for n in self.stages[self.stage_of(name) - 1] if self.nodes[n].alive]
        if self.random.random() < 0.3 or (self.spare and len(mates) == 1):
            self.restart(name)
        else:
            self.kill(name)

    def total(self, what):
        return sum((self.nodes[name].core.counts for name in self.origins), Counter())[what]

    def home(self):
        """The microbatches that have come back."""
        return {(n, number) for n in self.origins for number in self.nodes[n].books.added}

    def ends(self):
        """Begun, done and lost, of all data peers."""
        return tuple(
            self.total(what)
            for what in (MicrobatchEvent.BEGUN, MicrobatchEvent.DONE, MicrobatchEvent.LOST)
        )
