"""The core of the fragment exchange: alone, event by event; and many of them over bad lines."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
from core_worlds import CODE_BYTES, GROUP, Peer, World, stamp_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from protocol.diloco import commands as e
from protocol.diloco.collecting import MAX_COLLECT_S
from protocol.diloco.core import FragmentCore
from protocol.diloco.peers import LATE_ROUNDS
from protocol.outcomes import RefusalReason
from protocol.trainer_messages import Merge
from protocol.wire.fragment_messages import (
    ChunkResult,
    ChunkStateReply,
    Contribution,
    FragmentSettled,
    GetChunkState,
    GetResult,
    GetStamps,
    NoResult,
    Proof,
    Result,
    Stamp,
    Stamps,
    mask_of,
)

MAX_RETURN_S = 2 * MAX_COLLECT_S
"""The longest that a machine waits for its results."""

CommandT = TypeVar("CommandT")
ROUND_S = 10.0
LONG_ROUND_S = 2 * MAX_RETURN_S
"""No send of one round lasts into the next."""
CALM_CYCLES = 4
"""After the last loss: enough that every difference has shown and been healed."""


def of_kind(commands: list[e.FragmentCommand], kind: type[CommandT]) -> list[CommandT]:
    return [command for command in commands if isinstance(command, kind)]


def asked_of(commands: list[e.FragmentCommand], kind: type[e.FragmentQuestion]) -> list[e.Ask]:
    return [each for each in of_kind(commands, e.Ask) if isinstance(each.question, kind)]


# --- many -----------------------------------------------------------------------------------------
def train(world: World, cycles: range, jitter_s: float, round_s: float = ROUND_S) -> None:
    """Each peer sends each fragment once in each round, at about its moment."""
    num_fragments, began_s = len(world.num_chunks), world.now_s
    for cycle in cycles:
        for peer in world.peers.values():
            start_s = began_s + (cycle - cycles.start) * round_s
            start_s += world.random.uniform(0, jitter_s)
            world.at(start_s, partial(setattr, peer, "round", cycle))
            for fragment in range(num_fragments):
                at_s = start_s + fragment * round_s / num_fragments
                world.at(at_s, partial(peer.send, fragment, cycle))
    world.run(began_s + len(cycles) * round_s + jitter_s)


def assert_same_bytes(world: World) -> None:
    first, *others = world.peers.values()
    for other in others:
        assert other.memory.values() == first.memory.values()
        for fragment in range(len(world.num_chunks)):
            assert other.core.ledger(fragment).stamps == first.core.ledger(fragment).stamps


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    names=st.sampled_from(["ab", "abc", "abcde"]),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    delay_s=st.sampled_from([0.01, 0.5, 3.0]),
    jitter_s=st.sampled_from([0.0, 2.0]),
)
def test_whatever_is_lost_or_late_all_have_the_same_bytes_again(
    seed, names, loss, delay_s, jitter_s
):
    world = World(names, seed, num_chunks=[2, 1, 3], loss=loss, delay_s=delay_s)
    train(world, range(4), jitter_s)
    world.calm()
    world.delay_s = min(delay_s, 0.5)
    train(world, range(4, 4 + CALM_CYCLES), jitter_s, LONG_ROUND_S)
    world.run(world.now_s + LONG_ROUND_S)
    assert_same_bytes(world)
    last = 3 + CALM_CYCLES
    for peer in world.peers.values():
        for fragment, chunks in enumerate(peer.memory.chunks):
            ledger = peer.core.ledger(fragment)
            assert [ledger.cycle(chunk) for chunk in range(len(chunks))] == [last] * len(chunks)
            assert (fragment, last) in peer.trainer.merged
        assert sorted((each.fragment, each.cycle) for each in peer.returned) == sorted(peer.sent)
        assert peer.is_idle


@pytest.mark.parametrize("seed", range(5))
def test_a_spoilt_chunk_is_healed_and_the_others_do_not_move(seed):
    world, untouched = (World("abc", seed, num_chunks=[2, 3], delay_s=0.2) for _ in range(2))
    for each in (world, untouched):
        train(each, range(3), 0.0)
    world.peers["b"].memory.chunks[1][2].value = bytes(16)
    for each in (world, untouched):
        train(each, range(3, 6), 0.0)
        each.run(each.now_s + MAX_RETURN_S)
    assert_same_bytes(world)
    counts = world.peers["b"].core.counts
    assert counts.diverged == counts.healed >= 1
    assert all(world.peers[name].core.counts.healed == 0 for name in "ac")
    assert world.peers["a"].memory.values()[0] == untouched.peers["a"].memory.values()[0]


@pytest.mark.parametrize("seed", range(5))
def test_two_that_differ_with_equal_histories_agree_when_the_run_is_over(seed):
    world = World("ab", seed)
    train(world, range(2), 0.0)
    lower = min(
        world.peers.values(), key=lambda peer: stamp_of(1, peer.name.encode(), 1, 2, 4).digest
    )
    for peer in world.peers.values():
        value = peer.name.encode()
        peer.memory.chunks[0][1].write(value)
        peer.core.ledger(0).healed(1, 1, stamp_of(1, value, 1, 2, 4))
        peer.round, peer.is_over = 2, True
    for peer in world.peers.values():
        ledger = peer.core.ledger(0)
        digest = b"".join(stamp.digest for stamp in ledger.stamps)[:16]
        other = next(p for p in world.peers.values() if p is not peer)
        other.told().received(peer.name, FragmentSettled(GROUP, 0, 1, digest), {})
    world.run(world.now_s + MAX_RETURN_S)
    assert_same_bytes(world)
    assert world.peers["a"].memory.values()[0][1] == lower.name.encode()


def test_equal_seeds_give_equal_commands():
    told = []
    for _ in range(2):
        world = World("abc", 7, num_chunks=[2, 2], loss=0.2, delay_s=1.0)
        train(world, range(3), 1.0)
        told.append([peer.commands for peer in world.peers.values()])
    assert told[0] == told[1]


# --- one, event by event --------------------------------------------------------------------------
class WorldOfOne(World):
    """One peer, `a`, with others of which nothing is there but what is seen of them."""

    def __init__(self, seen: e.GroupSeen, num_chunks: list[int] | None) -> None:
        self.seen = seen
        super().__init__("a", num_chunks=num_chunks, delay_s=0.0)

    def seen_by(self, peer: Peer) -> e.GroupSeen:
        return self.seen

    def post(self, sender: str, receiver: str, message: e.Unasked | Proof, codes: bytes) -> None:
        """Nobody is there to receive it."""


class Alone:
    """The core of `a` among silent others; what it orders to be written is done at once."""

    def __init__(self, others: str = "b", num_chunks: list[int] | None = None) -> None:
        seen = e.GroupSeen(0, frozenset("a" + others), dict.fromkeys(others, 0))
        self.world = WorldOfOne(seen, num_chunks)
        self.peer = self.world.peers["a"]
        self.peer.asks = False

    @property
    def refused(self) -> Counter[RefusalReason]:
        return self.peer.core.counts.refused

    def see(self, others: str, round_: int, *, is_over: bool = False) -> None:
        """These others are there, in our round."""
        rounds = dict.fromkeys(others, round_)
        self.world.seen = e.GroupSeen(round_, frozenset("a" + others), rounds, is_over)

    def __call__(self, what: str, *told: Any) -> list[e.FragmentCommand]:
        """Tell it this, by a method's name; what it wants by the time that all has been done."""
        self.peer.commands.clear()
        getattr(self.peer.told(), what)(*told)
        self.world.run(self.world.now_s)
        return list(self.peer.commands)

    def wait(self, seconds: float) -> list[e.FragmentCommand]:
        """What it wants in that time."""
        self.peer.commands.clear()
        self.world.run(self.world.now_s + seconds)
        return list(self.peer.commands)

    def send(self, cycle: int = 0, fragment: int = 0) -> list[e.FragmentCommand]:
        self.peer.commands.clear()
        self.see("".join(self.world.seen.rounds), cycle)
        self.peer.send(fragment, cycle)
        self.world.run(self.world.now_s)
        return list(self.peer.commands)

    def contribution(
        self, sender: str, cycle: int = 0, stamps: tuple[Stamp, ...] | None = None
    ) -> tuple[str, str, Contribution, e.Codes]:
        ledger = self.peer.core.ledger(0)
        if stamps is None:
            stamps = tuple(ledger.stamps)
        message = Contribution(GROUP, 0, cycle, 1, 1, 1, stamps, (), (), bytes(64))
        codes = {stamp.chunk: memoryview(bytes(CODE_BYTES)) for stamp in stamps}
        return "received", sender, message, codes

    def result(self, sender: str, chunk: int, cycle: int = 0, steps: int | None = None) -> Result:
        """Of the sender alone."""
        base = self.peer.core.ledger(0).stamp(chunk)
        of_chunk = ChunkResult(
            chunk,
            base.steps if steps is None else steps,
            base.weight,
            base.digest,
            mask_of([0]),
            bytes(16),
        )
        return Result(
            GROUP,
            0,
            cycle,
            sender,
            1,
            (sender,),
            (1,),
            (bytes(16),),
            (of_chunk,),
            (chunk,),
            bytes(64),
        )

    def come(self, sender: str, result: Result) -> list[e.FragmentCommand]:
        parts = {chunk: memoryview(bytes(CODE_BYTES)) for chunk in result.carried}
        return self("received", sender, result, parts)


def test_a_peer_alone_steps_at_once():
    alone = Alone(others="")
    commands = alone.send()
    (returned,) = of_kind(commands, e.SendEnded)
    assert (returned.contributors, returned.missing) == (1, 0)
    (merge,) = of_kind(commands, Merge)
    assert merge.stepped == (0, 1)
    assert [stamp.steps for stamp in alone.peer.core.ledger(0).stamps] == [1, 1]


def test_a_fragment_is_checked_and_contributed_and_waits_for_its_owners():
    alone = Alone("bc", num_chunks=[3])
    commands = alone.send()
    assert isinstance(commands[0], e.Verify)
    contributions = of_kind(commands, e.Contribute)
    assert {each.owner for each in contributions} == set("abc")
    assert sorted(stamp.chunk for each in contributions for stamp in each.stamps) == [0, 1, 2]
    assert of_kind(commands, e.SendEnded) == []
    commands = alone.wait(MAX_RETURN_S + 1)
    (returned,) = of_kind(commands, e.SendEnded)
    assert (returned.missing, returned.contributors) == (2, 1)
    assert of_kind(commands, Merge)[0].stepped != ()


def test_owners_that_brought_nothing_are_chosen_again_when_they_are_heard():
    alone = Alone("b")
    alone.send(0)
    alone.wait(MAX_RETURN_S + 1)
    assert {each.owner for each in of_kind(alone.send(1), e.Contribute)} == {"a"}
    alone("received", "b", NoResult(GROUP, 0, 1), {})
    alone.wait(MAX_RETURN_S + 1)
    assert {each.owner for each in of_kind(alone.send(2), e.Contribute)} == {"a", "b"}


def test_an_owner_that_is_stuck_is_not_chosen_again_before_it_is_heard():
    alone = Alone("b")
    alone.send(0)
    alone.world.seen = replace(alone.world.seen, present=frozenset("a"))
    (returned,) = of_kind(alone.wait(MAX_COLLECT_S + 1), e.SendEnded)
    assert returned.seconds < MAX_RETURN_S
    assert {each.owner for each in of_kind(alone.send(1), e.Contribute)} == {"a"}
    alone("received", "b", NoResult(GROUP, 0, 1), {})
    alone.wait(MAX_RETURN_S + 1)
    assert {each.owner for each in of_kind(alone.send(2), e.Contribute)} == {"a", "b"}


def test_nobody_far_from_a_cycle_is_waited_for():
    alone = Alone("b")
    alone.world.seen = replace(alone.world.seen, rounds={"b": LATE_ROUNDS + 1})
    alone.peer.send(0, 0)
    alone.world.run(1.0)
    assert [returned.missing for returned in alone.peer.returned] == [0]


def test_an_owner_that_says_it_has_nothing_is_waited_for_no_longer():
    alone = Alone("b")
    alone.send()
    alone("received", "b", NoResult(GROUP, 0, 0), {})
    (returned,) = of_kind(alone.wait(MAX_COLLECT_S + 1), e.SendEnded)
    assert returned.missing == 1


def test_an_owner_that_is_gone_is_waited_for_no_longer():
    """Before any patience is learnt, too."""
    alone = Alone("b")
    alone.send()
    assert of_kind(alone("tick"), e.SendEnded) == []
    alone.see("", 0)
    (returned,) = of_kind(alone("tick"), e.SendEnded)
    assert returned.missing == 1
    assert returned.seconds < MAX_COLLECT_S


def test_nobody_waits_for_what_comes_to_nothing():
    """Our part of a cycle of which only a word has come."""
    alone = Alone("b")
    word = Contribution(GROUP, 0, 0, 0, 1, 1, (), (), (), bytes(64))
    alone("received", "b", word, {})
    commands = alone.wait(MAX_COLLECT_S + 1)
    assert of_kind(commands, e.SendMessage) == [e.SendMessage("b", NoResult(GROUP, 0, 0))]


def test_fragments_sent_together_leave_in_that_order_however_long_their_checks_take():
    world = World("ab", seed=3, num_chunks=[1, 1, 1], delay_s=0.1)
    for fragment in (2, 0, 1):
        world.peers["a"].send(fragment, 0)
    world.run(5.0)
    left = [each.sent.fragment for each in of_kind(world.peers["a"].commands, e.Contribute)]
    assert [fragment for i, fragment in enumerate(left) if fragment not in left[:i]] == [2, 0, 1]


# --- what is told to the others -------------------------------------------------------------------
def test_a_newcomer_is_told_what_we_are_through_with_before_we_contribute():
    alone = Alone("")
    alone.send(0)
    alone.see("b", 1)
    commands = alone.send(1)
    first, *_ = of_kind(commands, e.SendMessage)
    assert first.peer_id == "b"
    assert isinstance(first.message, FragmentSettled)
    assert first.message.cycle == 0
    assert commands.index(first) < commands.index(of_kind(commands, e.Contribute)[0])


def test_a_contribution_too_late_gets_what_was_made_without_it():
    alone = Alone("")
    alone.send(0)
    alone.see("b", 0)
    commands = alone(*alone.contribution("b", 0))
    assert alone.refused == {RefusalReason.AHEAD: 1}
    sent = [send.message for send in of_kind(commands, e.SendMessage)]
    assert [type(message) for message in sent] == [Result, Result, FragmentSettled]
    results = [message for message in sent if isinstance(message, Result)]
    assert [message.carried for message in results] == [(0,), (1,)]


def remembered_by(core: FragmentCore) -> set[str]:
    return {*core._acquainted, *(peer_id for _, peer_id in core._peers._settled)}


def test_who_is_through_says_so_to_all_and_lets_the_absent_go():
    alone = Alone("bc")
    alone("received", "c", FragmentSettled(GROUP, 0, 0, bytes(16)), {})
    assert "c" in remembered_by(alone.peer.core)
    alone.see("b", 0)
    alone.send(0)
    commands = alone.wait(MAX_RETURN_S + MAX_COLLECT_S)
    settled = [
        s for s in of_kind(commands, e.SendMessage) if isinstance(s.message, FragmentSettled)
    ]
    assert {send.peer_id for send in settled} == {"b"}
    assert e.ForgetOthers(frozenset("ab")) in commands
    assert remembered_by(alone.peer.core) == {"a", "b"}


# --- healing --------------------------------------------------------------------------------------
def test_a_contribution_on_a_better_state_has_that_fetched_once():
    alone = Alone("b")
    better = Stamp(1, 5, 5, bytes(16))
    fetch = e.Ask("b", GetChunkState(GROUP, 0, 1))
    alone.see("b", 5)
    assert asked_of(alone(*alone.contribution("b", 5, (better,))), GetChunkState) == [fetch]
    assert asked_of(alone(*alone.contribution("b", 5, (better,))), GetChunkState) == []
    alone("answered", "b", GetChunkState(GROUP, 0, 1), None, {})
    assert asked_of(alone(*alone.contribution("b", 6, (better,))), GetChunkState) == [fetch]


def test_while_a_chunk_is_fetched_the_owners_get_nothing_but_a_word():
    alone = Alone("b")
    alone.see("b", 5)
    alone(*alone.contribution("b", 5, (Stamp(1, 5, 5, bytes(16)),)))
    contributions = of_kind(alone.send(5), e.Contribute)
    assert {each.stamps for each in contributions} == {()}
    alone("answered", "b", GetChunkState(GROUP, 0, 1), None, {})
    alone.wait(MAX_RETURN_S + 1)
    contributions = of_kind(alone.send(6), e.Contribute)
    assert contributions
    assert all(each.stamps for each in contributions)


def test_of_equal_histories_the_lower_digest_is_fetched_when_the_run_is_over_and_none_before():
    for is_over, digest, asks in [(False, 0, False), (True, 0, True), (True, 255, False)]:
        alone = Alone("b")
        alone.see("b", 0, is_over=is_over)
        ours = alone.peer.core.ledger(0).stamp(0)
        theirs = Stamp(0, ours.steps, ours.weight, bytes([digest]) * 16)
        own = alone.peer.core.ledger(0).stamp(1)
        alone("answered", "b", GetStamps(GROUP, 0), Stamps(0, (theirs, own), (0, 0)), {})
        commands = alone("answered", "b", GetResult(GROUP, 0, 0, 0), None, {})
        assert bool(asked_of(commands, GetChunkState)) is asks


@pytest.mark.parametrize("wrong", ["fragment", "cycle", "chunk", "codes", None])
def test_an_answer_that_was_not_asked_for_is_none(wrong):
    alone = Alone("b")
    better = Stamp(1, 5, 5, bytes(16))
    result = alone.result("b", 0 if wrong == "chunk" else 1, 1 if wrong == "cycle" else 0)
    if wrong == "fragment":
        result = structs.replace(result, fragment=1)
    codes = {} if wrong == "codes" else {result.chunks[0].chunk: memoryview(bytes(CODE_BYTES))}
    alone.send()
    alone.peer.core._machines[0].healing._said["b"] = {1: better}
    commands = alone("answered", "b", GetResult(GROUP, 0, 0, 1), result, codes)
    assert bool(of_kind(commands, e.WriteResults)) is (wrong is None)
    assert bool(asked_of(commands, GetChunkState)) is (wrong is not None)


def test_what_comes_while_a_chunk_is_fetched_goes_on_top_of_it():
    alone = Alone("b")
    theirs = b"their value, which we do not have"
    stamp = stamp_of(1, theirs, 3, 3, 3)
    alone.send(4)
    of_chunk = ChunkResult(1, stamp.steps, stamp.weight, stamp.digest, mask_of([0]), bytes(16))
    on_top = Result(GROUP, 0, 4, "b", 1, ("b",), (1,), (bytes(16),), (of_chunk,), (1,), bytes(64))
    commands = alone.come("b", on_top)
    assert asked_of(commands, GetChunkState) == [e.Ask("b", GetChunkState(GROUP, 0, 1))]
    state = ChunkStateReply(0, 3, stamp)
    alone("answered", "b", GetChunkState(GROUP, 0, 1), state, {1: memoryview(theirs)})
    ledger = alone.peer.core.ledger(0)
    assert (ledger.stamp(1).steps, ledger.cycle(1)) == (4, 4)
