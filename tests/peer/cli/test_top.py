"""`loco-peer top` on a terminal of 80 columns and 24 lines, driven by textual's pilot."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from textual.widgets import TabbedContent

from peer.cli.top import CURVE_LINES, SECTIONS, Top, curve, narrowed
from peer.facts import MicrobatchTime, PeerState, PipelineFacts, ReachFacts
from peer.observe.control import NoDaemon
from peer.observe.history import History
from peer.observe.status import Outcomes, PeerStatus, Status
from peer.runtime import NetworkStatistics
from protocol.outcomes import SkipReason

pytestmark = pytest.mark.slow

PIPELINE = PipelineFacts(
    iteration_s=1.5, spent_s=dict.fromkeys(MicrobatchTime, 1.0), paths=("1:dddddddd",)
)
STATUS = Status(
    peer_id="12D3KooWaaaaaaaabbbbbbbb",
    run_id="ab" * 16,
    state=PeerState.TRAINING,
    doing="training",
    step=160,
    total_steps=1600,
    tokens_per_s=2900.0,
    swarm_tokens_per_s=8400.0,
    left_s=372.0,
    validation_loss=2.25,
    outcomes=Outcomes(7, {SkipReason.DEADLINE: 3}, 0.7),
    peers=(
        PeerStatus("12D3KooWcccccccc", PeerState.DOWNLOADING),
        PeerStatus("12D3KooWdddddddd", PeerState.TRAINING, 7, 0.0125, 171, 2.5, 6, 0.25),
    ),
    reach=ReachFacts().to_json(),
    address="/ip4/192.168.1.5/tcp/1/p2p/12D3KooWaaaaaaaabbbbbbbb",
    metrics="http://127.0.0.1:1/metrics",
    seconds={"train": 90.0, "exchange": 10.0},
    up_s=100.0,
)


def snapshot(status: Status = STATUS, **more: Any) -> dict[str, Any]:
    history = History()
    for step in range(200):
        sample = Status(up_s=2.0 * step, validation_loss=5 - step / 100, tokens_per_s=100.0 * step)
        history.note(sample, NetworkStatistics({"a": 1000 * step}, {}))
    lines = ["05:50:20 linked with dddddddd", "05:50:21 the last \x1b[31m line"]
    return status.to_json() | {"history": history.to_json(), "log": lines} | more


def screens(read: Callable[[], Any], *keys: str) -> list[str]:
    """What stands on the screen at first, and after each key."""

    async def drive() -> list[str]:
        top = Top(read, every_s=1e6)
        shown = []
        async with top.run_test(size=(80, 24)) as pilot:
            for key in ("", *keys):
                if key:
                    await pilot.press(key)
                await top.workers.wait_for_complete()
                await pilot.pause()
                rows = top.screen._compositor.render_strips()
                shown.append("\n".join("".join(part.text for part in row) for row in rows))
        return shown

    return asyncio.run(drive())


def row_of(name: str, shown: str) -> list[str]:
    """The words of the line that begins with one."""
    (row,) = [line.split() for line in shown.splitlines() if line.split()[:1] == [name]]
    return row


def test_each_key_shows_its_section_and_all_keys_are_shown() -> None:
    first, *others = screens(snapshot, "2", "3", "4", "5", "6")
    for shown in (first, *others):
        assert max(map(len, shown.splitlines())) <= 80
        assert len(shown.splitlines()) == 24
        assert "bbbbbbbb in run abababab  training" in shown
        assert "step 160 of 1,600 (10%), 2,900 tokens/s (swarm 8,400), 6 min left" in shown
        for number, name in enumerate(SECTIONS, 1):
            assert f"{number} {name}" in shown.splitlines()[-1]
        assert "q Quit" in shown
    peer, links, rounds, stages, log = others
    assert "held-out loss, mean of all: now 3.0100, from 3.0100 to 5.0000 so far" in first
    assert row_of("dddddddd", first) == ["dddddddd", "training", "171", "2.5000"]
    assert "http://127.0.0.1:1/" in peer
    assert "tokens/s of this peer: now 19,900" in peer
    assert row_of("dddddddd", links)[:6] == ["dddddddd", "12.5", "ms", "250.0", "ms", "6"]
    assert "skipped: deadline  3" in rounds
    assert row_of("training", rounds)[:4] == ["training", "90", "s", "90%"]
    assert "holds the whole model" in stages
    assert log.index("the last") < log.index("linked with dddddddd")
    assert "\\x1b[31m" in log, "no stranger paints on this terminal"


def test_a_stage_says_what_it_holds() -> None:
    stage = Status(part="stage/1", microbatches={"done": 120}, pipeline=PIPELINE.to_json())
    assert "microbatches  done 120" in screens(lambda: snapshot(stage), "5")[1]


def test_what_is_wrong_stands_over_every_section() -> None:
    wrong = [{"name": "alone", "words": "alone for 9 rounds", "help": "troubleshooting.md#alone"}]
    for shown in screens(lambda: snapshot(problems=wrong), "6"):
        assert "! alone for 9 rounds (docs/troubleshooting.md#alone)" in shown


def test_a_peer_of_which_nothing_is_known_is_shown() -> None:
    empty = Status().to_json() | {"history": History().to_json(), "log": []}
    for shown in screens(lambda: empty, "2", "3", "4", "5", "6"):
        assert "starting" in shown


def test_the_daemons_end_is_said_and_its_return_ends_that() -> None:
    answers = iter([snapshot(), NoDaemon("no daemon is running in /home"), snapshot()])
    said: list[Any] = []

    def read() -> Any:
        said.append(next(answers, snapshot()))
        if isinstance(said[-1], Exception):
            raise said[-1]
        return said[-1]

    async def drive() -> list[bool]:
        top = Top(read, every_s=1e6)
        async with top.run_test(size=(80, 24)) as pilot:
            shown = []
            for _ in range(3):
                await top.workers.wait_for_complete()
                await pilot.pause()
                shown.append(top.query_one("#trouble").display)
                top._look()
        return shown

    assert asyncio.run(drive()) == [False, True, False]


def test_without_colours_it_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with_colours = screens(snapshot, "3")
    monkeypatch.setenv("NO_COLOR", "1")
    assert screens(snapshot, "3") == with_colours


def test_the_sections_can_be_chosen_without_numbers() -> None:
    async def drive() -> str:
        top = Top(snapshot, every_s=1e6)
        async with top.run_test(size=(80, 24)) as pilot:
            await pilot.press("right")
            return top.query_one(TabbedContent).active

    assert asyncio.run(drive()) == "section-2"


# --- curves ---------------------------------------------------------------------------------------


def test_a_curve_rises_in_eighths() -> None:
    low, full = chr(0x2581), chr(0x2588)
    assert curve([0.0, 1.0, None, 0.0], 10, 1) == [f"{low}{full} {low}"]
    assert curve([0.0, 1.0], 10, 2) == [f" {full}", f"{low}{full}"]
    assert curve([None], 10, CURVE_LINES) == [" "] * CURVE_LINES


def test_many_values_share_a_column() -> None:
    assert narrowed([1.0, 3.0, None, None, 5.0, None], 3) == [2.0, None, 5.0]


# --- the command ----------------------------------------------------------------------------------


def test_only_top_imports_textual_and_it_needs_a_terminal(tmp_path) -> None:
    modules = "peer.cli.app, peer.cli.client, peer.observe.status"
    said = f"import sys, {modules}; print('textual' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
    command = [sys.executable, "-c", "from peer.cli import main; main()", "top", "--home", "x"]
    top = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert top.returncode == 2
    assert "loco-peer status --json" in top.stderr
