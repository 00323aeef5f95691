"""Curves in real libraries, read back from their own files; and sick ones, which harm nobody."""

import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import trio
from dashboard import ROOT

from peer.facts import Facts
from peer.observe import tracking
from peer.observe.metrics import Now
from peer.observe.sink import HANG_S, LIBRARIES, Curve, Point
from peer.observe.status import Outcomes, PeerStatus, Status
from peer.observe.tracking import POINT_EVERY_S, Tracking, curve_of, point_of
from peer.options.values import TRACKERS
from peer.runtime import NetworkStatistics
from peer.runtime.child_process import OUT_OF_MEMORY
from protocol.outcomes import SkipReason
from protocol.run.amendments import AmendedSpec
from protocol.run.run_spec import RunSpec

NAMES = {
    "loss/train",
    "loss/validation",
    "run/round",
    "run/learning_rate",
    "run/tokens",
    "run/tokens_per_second",
    "run/swarm_tokens_per_second",
    "run/peers",
    "rounds/inner_steps",
    "rounds/seconds",
    "rounds/averaged",
    "rounds/skipped",
    "rounds/averaged_share",
    "line/sent_bytes",
    "line/received_bytes",
    "cost/so_far",
}
PEER_ID = "12D3KooWLcoAViUEMJHFGxJxW2QwdcYGCAJdegMuarjxdfuCnYSY"


def now(**known) -> Now:
    facts = Facts(PEER_ID, 1, run_id="081e3c30e5ad81fc6381269b750ecd67", nominal_step=30.5)
    facts.spec, facts.inner_steps = AmendedSpec(RunSpec(name="demo")), 12
    return Now(facts, Status(**known), NetworkStatistics({"a": 7, "b": 1}, {"a": 2}), 5.0)


# --- what is told ---------------------------------------------------------------------------------


def test_a_point_has_these_values_and_the_docs_name_them():
    known = now(
        train_loss=2.0,
        validation_loss=3.0,
        round=4,
        learning_rate=0.1,
        tokens=500,
        tokens_per_s=10.0,
        swarm_tokens_per_s=30.0,
        peers=(PeerStatus("b", "training"),),
        outcomes=Outcomes(3, {SkipReason.DEADLINE: 1, SkipReason.NO_PARTNER: 1}, 0.6),
        price_per_hour=0.5,
        up_s=7200.0,
    )
    known.facts.steps_per_s = 0.5
    point = point_of(known, 5.0)
    assert point is not None
    assert point.step == 30
    assert set(point.values) == NAMES
    assert point.values["line/sent_bytes"] == 8
    assert point.values["rounds/skipped"] == 2
    assert point.values["rounds/seconds"] == 2.0
    assert point.values["cost/so_far"] == 1.0
    table = (ROOT / "docs/watching.md").read_text().partition("## Curves in other programs")[2]
    assert set(re.findall(r"^\| `(\w+/\w+)` \|", table, re.MULTILINE)) == NAMES


def test_what_is_unknown_or_no_number_is_left_out_and_untrained_peers_have_no_point():
    known = now(train_loss=float("nan"), validation_loss=None)
    point = point_of(known, 5.0)
    assert point is not None
    assert not {"loss/train", "loss/validation", "rounds/seconds", "cost/so_far"} & set(
        point.values
    )
    known.facts.inner_steps = 0
    assert point_of(known, 5.0) is None


def test_a_run_is_a_project_and_a_peer_a_curve_in_it(tmp_path):
    curve = curve_of(now(), "trackio", tmp_path)
    assert (curve.project, curve.run, curve.name) == ("demo-081e3c30", "demo", PEER_ID[-8:])
    assert curve.key == f"081e3c30-{PEER_ID}"
    assert curve.folder == str(tmp_path / "demo-081e3c30")
    assert curve.config["name"] == curve.run
    assert curve.config["peer_id"] == PEER_ID
    json.dumps(curve.config)


@pytest.mark.slow
def test_each_option_has_a_library_and_none_is_imported_unasked():
    assert set(LIBRARIES) == set(TRACKERS)
    code = f"import sys, peer.observe.tracking; print([n for n in {TRACKERS} if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


# --- how it is told -------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch) -> None:
    """Points in quick succession; the clock is real, as the sinks' processes are."""
    monkeypatch.setattr(tracking, "POINT_EVERY_S", 0.01)
    monkeypatch.setattr(tracking, "MAX_PAUSE_S", 0.02)


def curve_in(folder: Path, sink: str) -> Curve:
    return curve_of(now(), sink, folder)


async def live(curve: Curve, steps: Iterator[int]) -> list[str]:
    """The life of a peer that comes to these steps, and ends; returns what failed in its sink."""
    stop, why = trio.Event(), list[str]()

    def look() -> Point | None:
        step = next(steps, None)
        if step is None:
            stop.set()
        return None if step is None else Point(step, 9.0, {"loss/train": 1 / step})

    with trio.fail_after(300):
        await Tracking(lambda: curve, look, why.append, stop).run()
    return why


WANTED = [(1, 1.0), (2, 0.5), (4, 0.25), (8, 0.125), (16, 0.0625)]


async def live_twice(folder: Path, sink: str) -> Curve:
    """The second life begins at an older checkpoint."""
    curve = curve_in(folder, sink)
    assert await live(curve, iter([1, 2, 4])) == []
    assert await live(curve, iter([2, 4, 8, 16])) == []
    return curve


def needs(library: str) -> pytest.MarkDecorator:
    why = f"{library} is not here: pip install 'loco-peer[{library}]'"
    return pytest.mark.skipif(find_spec(library) is None, reason=why)


@pytest.mark.slow
async def test_tensorboard_goes_on_with_the_curve_after_a_restart(tmp_path, hasty):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    curve = await live_twice(tmp_path, "tensorboard")
    read = accumulators.EventAccumulator(str(tmp_path / curve.project / curve.name)).Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss/train")] == WANTED
    assert {each.wall_time for each in read.Scalars("loss/train")} == {9.0}
    (config,) = read.Tensors("config")
    assert json.loads(config.tensor_proto.string_val[0].decode().strip("`\n")) == curve.config


@pytest.mark.slow
@needs("trackio")
async def test_trackio_goes_on_with_the_curve_after_a_restart(tmp_path, monkeypatch, hasty):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    curve = await live_twice(tmp_path, "trackio")
    code = "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S;"
    code += "print(json.dumps([S.get_logs(*sys.argv[1:]), S.get_run_config(*sys.argv[1:])]))"
    command = [sys.executable, "-c", code, curve.project, curve.name]
    ran = await trio.run_process(command, capture_stdout=True)
    logs, config = json.loads(ran.stdout)
    assert [(each["step"], each["loss/train"]) for each in logs] == WANTED
    assert config["optimizer"] == curve.config["optimizer"]
    assert config["_Group"] == curve.run


@pytest.mark.slow
@needs("wandb")
async def test_wandb_goes_on_with_the_curve_after_a_restart(tmp_path, monkeypatch, hasty):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    curve = await live_twice(tmp_path, "wandb")
    files = sorted((tmp_path / curve.project / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.name for path in files} == {f"run-{curve.key}.wandb"}
    records = [record for path in files for record in records_of(path.read_bytes())]
    kinds = {record.WhichOneof("record_type") for record in records}
    assert not {"environment", "stats", "output_raw"} & kinds, "nothing of this machine"
    run = next(record.run for record in records if record.HasField("run"))
    assert not run.host, "nor its name"
    assert (run.project, run.run_group) == (curve.project, curve.run)
    assert (run.display_name, run.run_id) == (curve.name, curve.key)
    config = {each.key: json.loads(each.value_json) for each in run.config.update}
    assert config["optimizer"] == curve.config["optimizer"]
    steps = []
    for record in records:
        item = {each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
        if "loss/train" in item:
            steps.append((record.history.step.num, item["loss/train"]))
    assert steps == WANTED


def records_of(data: bytes) -> Iterator[Any]:
    """The file is a log of LevelDB: records in blocks of 32 KiB, cut where a block ends."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, body = 7, b""
    while at + 7 <= len(data):
        if at // 32768 != (at + 6) // 32768:
            at = (at // 32768 + 1) * 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        body += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(body)
            body = b""


# --- sick libraries -------------------------------------------------------------------------------

SICK = """
import os, signal, sys, time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def be(where):
    with (HERE / "calls").open("a") as calls:
        print(where, os.getpid(), file=calls)
    match os.environ["FAULT"].partition(" at "):
        case ("raises", _, at) if at == where:
            raise RuntimeError("no such\\n  luck")
        case ("exits", _, at) if at == where:
            sys.exit("I go")
        case ("dies", _, at) if at == where:
            os.kill(os.getpid(), signal.SIGKILL)
        case ("hangs", _, at) if at == where:
            while True:
                time.sleep(1)


class Run:
    def log(self, values, step):
        be("log")

    def finish(self):
        be("finish")


def init(**_):
    be("init")
    return Run()
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Callable[..., list[tuple[str, int]]]:
    """What a sick library was asked for, and in which process."""
    (tmp_path / "trackio.py").write_text(SICK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', ROOT)}")

    def found(*names: str) -> list[tuple[str, int]]:
        with suppress(FileNotFoundError):
            rows = (line.split() for line in (tmp_path / "calls").read_text().splitlines())
            return [(name, int(pid)) for name, pid in rows if not names or name in names]
        return []

    return found


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises at init", "RuntimeError: no such luck"),
        ("raises at log", "RuntimeError: no such luck"),
        ("exits at init", "SystemExit: I go"),
        ("dies at log", f"its process was killed by signal 9{OUT_OF_MEMORY}"),
    ],
)
async def test_a_library_that_fails_is_begun_again_and_told_of_once(
    tmp_path, monkeypatch, hasty, calls, fault, words
):
    monkeypatch.setenv("FAULT", fault)

    def steps() -> Iterator[int]:
        step = 0
        while len(calls("init")) < 3:
            yield (step := step + 1)

    assert await live(curve_in(tmp_path, "trackio"), steps()) == [words]
    pids = {pid for _, pid in calls("init")}
    assert len(pids) >= 3
    assert all(map(ended, pids))


@pytest.mark.slow
async def test_a_library_that_hangs_is_ended_and_told_of_once(
    tmp_path, monkeypatch, calls, mock_clock
):
    monkeypatch.setenv("FAULT", "hangs at log")
    why, step = list[str](), iter(range(1, 9))
    tracked = Tracking(
        lambda: curve_in(tmp_path, "trackio"),
        lambda: Point(next(step), 9.0, {}),
        why.append,
        trio.Event(),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tracked.run)
        for life in (1, 2):
            before_s = trio.current_time()
            with trio.fail_after(10**6):
                while len(calls("log")) < life:
                    if trio.current_time() - before_s < HANG_S / 2:
                        mock_clock.jump(POINT_EVERY_S)
                    await really(0.01)
            mock_clock.jump(HANG_S)
            while not ended(calls("log")[-1][1]):
                await really(0.01)
        nursery.cancel_scope.cancel()
    assert why == [f"its process did not answer for {HANG_S:g} s"]


async def really(seconds: float) -> None:
    await trio.to_thread.run_sync(threading.Event().wait, seconds)


@pytest.mark.slow
async def test_a_library_that_hangs_at_the_end_holds_the_daemon_for_a_moment_only(
    tmp_path, monkeypatch, hasty, calls
):
    monkeypatch.setenv("FAULT", "hangs at finish")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live, curve_in(tmp_path, "trackio"), iter([1]))
        while not calls("finish"):
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
        cancelled_s = trio.current_time()
    assert trio.current_time() - cancelled_s < 30
    assert ended(calls("finish")[0][1])


async def test_points_wait_for_a_sick_library_and_the_oldest_give_way(mock_clock, monkeypatch):
    monkeypatch.setattr(tracking, "MOST_POINTS", 3)
    step = iter(range(1, 9))
    tracked = Tracking(
        lambda: pytest.fail("not yet"), lambda: Point(next(step, 8), 9.0, {}), print, trio.Event()
    )
    mock_clock.autojump_threshold = 0
    await tracked._gather(8 * POINT_EVERY_S)
    assert [point.step for point in tracked._waiting] == [6, 7, 8]
