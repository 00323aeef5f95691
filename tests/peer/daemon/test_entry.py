"""A joiner looks at the run spec before it takes part in anything."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peer.cli.app import exit_code_of
from peer.daemon import entry as entry_file
from peer.daemon.entry import Following, choose_stage, join
from peer.daemon.experts import LATECOMERS, LOOK_AROUND_S
from peer.daemon.provision import ChosenPart
from peer.facts import Facts
from peer.observe.events import EventLog
from peer.options.config import check_options, load_config
from peer.options.exit_codes import ExitCode
from protocol.errors import InvalidRunSpec, LocoError
from protocol.membership.group import Group
from protocol.membership.returning import UNREACHED_S
from protocol.membership.view import Progress, Roster
from protocol.run.layout import part_of_stage
from protocol.run.run_spec import RunSpec, SyncSection
from protocol.run.sections import PipelineSection
from protocol.run.signed_spec import SignedSpec


class Swarm:
    """One peer that has a run spec, and all that a joiner asks of it."""

    addresses = ("/ip4/10.0.0.1/tcp/1",)
    software = "loco-peer 9.0.0"

    def __init__(self, spec: RunSpec) -> None:
        self.signed = SignedSpec(spec.to_bytes(), bytes(32), bytes(64))
        self.run_id = self.signed.run_id
        self.asked: list[str] = []

    async def enter(self) -> tuple[str, Any]:
        return "first", self

    def correct_clock(self) -> None:
        self.asked.append("clock")

    def entered(self, signed: SignedSpec) -> None:
        self.asked.append("door")

    async def add_peers(self, addresses: Any) -> None:
        self.asked.append("directory")

    async def fetch(self, ask: Any, *_: object) -> Any:
        return await ask(self)

    async def spec(self, run_id: str) -> SignedSpec:
        self.asked.append("spec")
        return self.signed

    async def obtain(self, spec: RunSpec, fetcher: object, choose_part: object) -> str:
        self.asked.append("data")
        return "supplies"


def parts_of(swarm: Any) -> Any:
    lines: list[bytes] = []
    events = EventLog(lines.append, peer="me", wall_time_s=trio.current_time, stream=None)
    facts, roster = Facts("me", 1), Roster(60.0)
    return SimpleNamespace(
        directory=swarm,
        roster=roster,
        greeter=swarm,
        sources=swarm,
        provision=swarm,
        facts=facts,
        events=events,
        admission=swarm,
        links=swarm,
    )


@pytest.mark.parametrize("method", ["noloco", "diloco"])
async def test_a_joiner_ends_before_it_fetches_data_of_a_run_that_it_cannot_train(
    tmp_path, monkeypatch, method
):
    sync = SyncSection(method=method)
    swarm: Any = Swarm(RunSpec(pipeline=PipelineSection(stages=2), sync=sync))
    config = load_config({"home": tmp_path}, {})

    def check(spec: RunSpec, _: int | None) -> None:
        check_options(config, spec)

    monkeypatch.setattr(entry_file, "Bootstrap", lambda *_: swarm)
    nursery: Any = None
    if method == "noloco":
        signed, _ = await join((), None, None, parts_of(swarm), check, nursery)
        assert signed == swarm.signed
        assert swarm.asked[-1] == "data"
        return
    with pytest.raises(InvalidRunSpec, match="stages average by") as refused:
        await join((), None, None, parts_of(swarm), check, nursery)
    assert swarm.asked == ["clock", "directory", "spec"]
    assert exit_code_of(refused.value) is ExitCode.USAGE


@pytest.mark.parametrize("run_id", ["its own", "another"])
async def test_who_follows_moves_when_that_very_run_is_there_and_fits(monkeypatch, run_id) -> None:
    swarm: Any = Swarm(RunSpec())
    expected = swarm.run_id if run_id == "its own" else "ef" * 16
    following = Following(expected, lambda signed: swarm.asked.append(signed.run_id))
    monkeypatch.setattr(entry_file, "Bootstrap", lambda *_: swarm)

    def check(*_: object) -> None:
        swarm.asked.append("check")

    nursery: Any = None
    joining = join((), None, None, parts_of(swarm), check, nursery, following)
    if run_id == "its own":
        await joining
        assert swarm.asked[2:] == ["spec", "check", swarm.run_id, "door", "data"]
        return
    with pytest.raises(LocoError, match="not what first trains") as left:
        await joining
    assert "loco-peer start goes back to the old run" in str(left.value)
    assert swarm.asked == ["clock", "directory"]


async def test_who_follows_waits_for_minutes_says_why_and_ends(monkeypatch, autojump_clock) -> None:
    swarm: Any = Swarm(RunSpec())
    parts = parts_of(swarm)
    monkeypatch.setattr(swarm, "enter", trio.sleep_forever)
    monkeypatch.setattr(entry_file, "Bootstrap", lambda *_: swarm)
    parts.facts.unlinked.failing["/ip4/203.0.113.5"] = "dial: nobody listens"
    following, nursery = Following(swarm.run_id, lambda _: None), None
    with pytest.raises(LocoError, match="not reached for 5 minutes .dial: nobody listens.") as left:
        await join((), None, None, parts, lambda *_: None, nursery, following)  # type: ignore[arg-type]
    assert trio.current_time() == UNREACHED_S
    assert exit_code_of(left.value) is ExitCode.FAILURE


async def test_a_joiner_of_a_run_with_keys_of_a_later_version_is_told_what_to_install(
    monkeypatch,
):
    swarm: Any = Swarm(RunSpec())
    later = json.loads(swarm.signed.spec_bytes) | {"later": 8}
    swarm.signed = replace(swarm.signed, spec_bytes=json.dumps(later).encode())
    monkeypatch.setattr(entry_file, "Bootstrap", lambda *_: swarm)
    nursery: Any = None
    with pytest.raises(InvalidRunSpec, match="pip install loco-peer==9.0.0 .*unknown key 'later'"):
        await join((), None, None, parts_of(swarm), lambda *_: None, nursery)


@pytest.mark.parametrize(("step", "is_trained"), [(0, False), (7, True)])
async def test_a_newcomer_takes_the_stage_that_nobody_holds_and_says_so(
    autojump_clock, step, is_trained
):
    spec = RunSpec(pipeline=PipelineSection(stages=3))
    swarm: Any = Swarm(spec)
    parts = parts_of(swarm)
    for peer_id, stage in (("a", 0), ("b", 1)):
        group = Group(swarm.run_id, part_of_stage(stage)).digest
        progress = Progress("training", group=group, step=step)
        parts.roster.heard(0.0, peer_id, 1, progress=progress)
    chosen = await choose_stage(parts, spec, swarm.run_id)
    assert chosen == ChosenPart(2, has_holders=False, is_trained=is_trained)
    assert parts.facts.group == Group(swarm.run_id, part_of_stage(2)).digest
    assert 2 * LOOK_AROUND_S <= trio.current_time() <= (2 + LATECOMERS) * LOOK_AROUND_S


async def test_a_newcomer_looks_again_who_has_chosen_with_it(autojump_clock):
    spec = RunSpec(pipeline=PipelineSection(stages=2))
    swarm: Any = Swarm(spec)
    parts = parts_of(swarm)

    def heard(peer_id: str, stage: int, state: str) -> None:
        group = Group(swarm.run_id, part_of_stage(stage)).digest
        progress = Progress(state, group=group)
        parts.roster.heard(trio.current_time(), peer_id, 1, progress=progress)

    heard("founder", 0, "training")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def others_choose_with_it() -> None:
            relay = Group(swarm.run_id, part_of_stage(1)).digest
            while parts.facts.group != relay:
                await trio.sleep(0.1)
            heard("b", 1, "downloading")
            heard("c", 1, "downloading")

        chosen = await choose_stage(parts, spec, swarm.run_id)
    assert chosen == ChosenPart(0, has_holders=True, is_trained=False)
    assert parts.facts.group == Group(swarm.run_id, part_of_stage(0)).digest


async def test_newcomers_that_choose_one_stage_together_do_not_wait_for_each_other(autojump_clock):
    spec = RunSpec(pipeline=PipelineSection(stages=2))
    chosen = []
    for own, other in (("b", "c"), ("c", "b")):
        swarm: Any = Swarm(spec)
        parts = parts_of(swarm)
        parts.facts = Facts(own, 1)
        for peer_id, stage, state in (("a", 0, "training"), (other, 1, "downloading")):
            group = Group(swarm.run_id, part_of_stage(stage)).digest
            progress = Progress(state, group=group)
            parts.roster.heard(trio.current_time(), peer_id, 1, progress=progress)
        chosen.append(await choose_stage(parts, spec, swarm.run_id, given=1))
    assert chosen == [ChosenPart(1, has_holders=False, is_trained=False)] * 2


@pytest.mark.parametrize(("stage", "has_holders"), [(1, True), (2, False)])
async def test_a_newcomer_takes_the_stage_that_it_was_given(autojump_clock, stage, has_holders):
    spec = RunSpec(pipeline=PipelineSection(stages=4))
    swarm: Any = Swarm(spec)
    parts = parts_of(swarm)
    group = Group(swarm.run_id, part_of_stage(1)).digest
    parts.roster.heard(0.0, "a", 1, progress=Progress("training", group=group))
    chosen = await choose_stage(parts, spec, swarm.run_id, stage)
    assert chosen == ChosenPart(stage, has_holders=has_holders, is_trained=False)
    assert parts.facts.group == Group(swarm.run_id, part_of_stage(stage)).digest
