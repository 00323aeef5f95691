"""A storm over a real swarm, and what it leaves of the model.

    found, joined     all homes train
    storm             one event after the other; the next comes when there is a newer checkpoint, or
                      after a while
    the run's end     all are started, and the run is waited for
    storm             what is left of the events
    started again     all are started and stopped, RESTARTS times

A peer that should be running after an event and is not is started again, as by a service manager;
the event's line says that it was not.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from peer.facts import PeerState

from .machines import DOWN, IN_THE_RUN, Machine, disks, lose_power
from .models import Model, Models
from .plan import Happening, Kind, draw

Line = dict[str, Any]
POLL_S: Final = 0.25
ENDS_S: Final = 150.0
"""How long the run's end is waited for when the storm is over."""
READY_S: Final = 60.0
RESTARTS: Final = 5
LINGER_S: Final = 6.0
"""How long a finished run that was started again is watched; a checkpoint is due every two."""
TRAINS_S: Final = 12.0
"""How long one that trains anew is watched."""
FULL_S: Final = 6.0
"""How long a disk is full: a checkpoint or two."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of a storm.

    Attributes:
        events: in all.
        after_end: so many of them, when the run is over.
        longest_s: of an event, where no newer checkpoint comes.
    """

    events: int = 50
    after_end: int = 10
    homes: int = 3
    total_steps: int = 200
    batch_size: int = 384
    inner_steps: int = 2
    longest_s: float = 6.0

    @property
    def run_toml(self) -> str:
        """A small model in small rounds; its steps are long for the size of their batches."""
        return f"""
name = "storm"
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 2
context_length = 128
[data]
validation_blocks = 4
[optimizer]
warmup_steps = 5
[training]
total_steps = {self.total_steps}
batch_size = {self.batch_size}
micro_batch = 16
[sync]
inner_steps = {self.inner_steps}
"""


class Storm:
    """See the top of the file.

    Args:
        tell: takes each line as it comes.
    """

    def __init__(
        self,
        setting: Setting,
        machines: Sequence[Machine],
        tell: Callable[[Line], None],
    ) -> None:
        self._setting = setting
        self._machines = machines
        self._tell = tell
        self._models = Models({m.name: m.peer.home.checkpoints_dir for m in machines})
        self._started_s = time.monotonic()
        self._highest = self._models.newest()
        self.lines = list[Line]()
        self.trained_anew = list[Model]()
        self.summary = Line()
        self.whole = False

    def run(self, seed: int, spec: Path) -> None:
        """All of it."""
        setting = self._setting
        self._begin(spec)
        plan = list(draw(seed, setting.homes, setting.events))
        during = setting.events - setting.after_end
        for happening in plan[:during]:
            self._event(happening)
        self._await_the_end()
        for happening in plan[during:]:
            self._event(happening)
        self._start_again()
        self.whole = True

    # --- parts ----------------------------------------------------------------------------------
    def _begin(self, spec: Path) -> None:
        founder, *others = self._machines
        with self._line("begin", None) as line:
            founder.enter("start", str(spec))
            address = founder.peer.ready()["addresses"][0]
            for other in others:
                other.enter("join", "--bootstrap", address)
            self._wait(self._all_in_the_run, READY_S)
            self._wait(lambda: self._models.newest().step > 0, READY_S)
            line["down"] = self._missed(self._machines)

    def _event(self, happening: Happening) -> None:
        target = None if happening.home is None else self._machines[happening.home]
        wanted = [self._machines[number] for number in sorted(happening.up)]
        with self._line(happening.kind, target) as line:
            next_step = self._highest.step + self._setting.total_steps / (
                self._setting.events - self._setting.after_end
            )
            line.update(self._act(happening.kind, target))
            self._wait(
                lambda: (
                    self._models.newest().step >= next_step
                    or (bool(wanted) and all(m.finished() for m in wanted))
                ),
                self._setting.longest_s,
            )
            line["down"] = self._missed(wanted)
        for machine in wanted:
            machine.start()

    def _act(self, kind: Kind, target: Machine | None) -> Line:
        """Have it happen. What there is to say of it."""
        if target is None:
            lose_power(self._machines)
            return {}
        match kind:
            case Kind.START:
                target.start()
            case Kind.KILL:
                target.kill()
            case Kind.HANG_UP:
                target.peer.hang_up()
            case Kind.TERM:
                since_s = time.monotonic()
                target.stop()
                return {"exit": target.peer.exit_code(), "took_s": _since(since_s)}
            case Kind.FULL | Kind.FULL_RESTART:
                return self._full(target, restart=kind is Kind.FULL_RESTART)
        return {}

    def _full(self, target: Machine, *, restart: bool) -> Line:
        target.fill_disk()
        failed = _failed_checkpoints(target)
        self._wait(lambda: _failed_checkpoints(target) > failed, FULL_S)
        line: Line = {}
        if restart:
            target.kill()
            target.start()
            self._wait(lambda: not target.running or target.state() == PeerState.TRAINING, READY_S)
            line["on_full_disk"] = target.state()
            if line["on_full_disk"] == DOWN:
                line["exit"] = target.peer.exit_code()
                line["said"] = target.peer.said().strip().rpartition("\n")[2]
        target.make_room()
        if restart and not target.running:
            target.start()
        return line

    def _await_the_end(self) -> None:
        with self._line("wait for the end", None) as line:
            line["finished"] = self._wait(self._all_finished_kept_up, ENDS_S)
            line["down"] = self._missed(self._machines)

    def _start_again(self) -> None:
        for machine in self._machines:
            machine.stop()
        last, before = self._models.newest(), set(self._models.all())
        for time_ in range(1, RESTARTS + 1):
            with self._line(f"start and stop, {time_} of {RESTARTS}", None) as line:
                for machine in self._machines:
                    machine.start()
                self._wait(self._all_in_the_run, READY_S)
                self._wait(lambda: not self._all_finished(), LINGER_S)
                if not self._all_finished():
                    self._wait(self._all_finished, TRAINS_S)
                line["down"] = self._missed(self._machines)
                for machine in self._machines:
                    machine.stop()
                new = set(self._models.all()) - before
                older = sorted(model for model in new if model.step < last.step)
                line["older_written"] = [f"{model.home}/{model.path}" for model in older]
                self.trained_anew += older

    def _all_in_the_run(self) -> bool:
        return all(machine.state() in IN_THE_RUN for machine in self._machines)

    def _all_finished_kept_up(self) -> bool:
        for machine in self._machines:
            machine.start()
        return self._all_finished()

    def _all_finished(self) -> bool:
        return all(machine.finished() for machine in self._machines)

    # --- lines ----------------------------------------------------------------------------------
    @contextmanager
    def _line(self, kind: str, target: Machine | None) -> Iterator[Line]:
        """One line: what has happened, and the newest checkpoint before and after it."""
        before, line = self._models.newest(), Line()
        at_s = time.monotonic() - self._started_s
        yield line
        after = self._models.newest()
        told = {
            "event": len(self.lines),
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "at_s": round(at_s, 1),
            "home": "all" if target is None else target.name,
            "kind": str(kind),
            "newest_before": before.step,
            "newest_after": after.step,
            "over_after": after.over,
            "fell": after.step < self._highest.step,
            "states": {machine.name: machine.state() for machine in self._machines},
        } | line
        self._highest = max(self._highest, after)
        self.lines.append(told)
        self._tell(told)

    def _missed(self, wanted: Sequence[Machine]) -> list[str]:
        """Those that should be running and are not."""
        return [machine.name for machine in wanted if not machine.running]

    def _wait(self, condition: Callable[[], object], seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while not (met := bool(condition())) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return met

    def close(self) -> None:
        """Look at what is left of the model, while the disks are there."""
        self.summary = self._summary()
        self._tell(self.summary)

    def _summary(self) -> Line:
        last = self._models.newest()
        falls = [line for line in self.lines if line["fell"]]
        return {
            "summary": True,
            "whole": self.whole,
            "seconds": _since(self._started_s),
            "falls": len(falls),
            "highest": asdict(self._highest),
            "last": asdict(last),
            "deepest_fall": max(
                (line["newest_before"] - line["newest_after"] for line in self.lines), default=0
            ),
            "not_running": sum(len(line.get("down", ())) for line in self.lines),
            "trained_anew": len(self.trained_anew),
            "ends_with_its_model": last.over and last.step >= self._setting.total_steps,
        }


def storm(
    setting: Setting, seed: int, checkout: Path, folder: Path, tell: Callable[[Line], None]
) -> Storm:
    """Let one pass over the code of a checkout; all its processes are gone afterwards.

    Args:
        folder: for homes, on disks of their own, and what the daemons say.
    """
    folders = [folder / f"home{number}" for number in range(setting.homes)]
    spec = folder / "run.toml"
    spec.write_text(setting.run_toml)
    with disks(folders):
        machines = [Machine(each, checkout) for each in folders]
        found = Storm(setting, machines, tell)
        try:
            found.run(seed, spec)
        finally:  # one that is cut off says what it saw
            found.close()
            lose_power(machines)
    return found


def _since(moment_s: float) -> float:
    return round(time.monotonic() - moment_s, 1)


def _failed_checkpoints(target: Machine) -> int:
    """How often its console has told of one, in the words of now and of before."""
    said = target.peer.said()
    return said.count("a checkpoint was not written") + said.count("CheckpointFailed")
