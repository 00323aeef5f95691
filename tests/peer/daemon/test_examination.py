"""What `loco-peer doctor` sees of a swarm: whom it meets, how others see it, how fast they send.

Whole daemons on the simulated network, with what makes real ones reachable; the same with real
processes stands in tests/e2e/test_doctor_of_a_run.py.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.content.pieces import PieceStore
from peer.content.service import ContentService
from peer.daemon.bootstrap import ATTEMPT_S
from peer.daemon.examination import (
    FETCH_S,
    Doctor,
    Examination,
    LineRate,
    Visitor,
    rate_of,
    visitor_of,
)
from peer.daemon.links import SILENCE_S
from peer.daemon.outside import be_reached
from peer.network.identity import load
from peer.observe.event_names import EventName
from peer.state.home import Home
from peer.training.corpus.blocks import Corpus
from peer.training.corpus.folder import KeptCorpus, prepare_corpus
from protocol.admission.statements import Verdict
from protocol.errors import StreamLost
from protocol.membership.dial_back import NatKind, Reach
from protocol.run.run_spec import DataSection, ModelSection, RunSpec, validated
from protocol.run.sections import AdmissionSection
from protocol.run.signed_spec import SignedSpec
from simulation.machine import Machine
from simulation.network import LinkModel, SimulatedInternet, SimulatedNetwork
from simulation.swarm import SimulatedSwarm, identity_of, open_swarm
from simulation.work import SimulatedWork

pytestmark = pytest.mark.slow

SEED = 1
NAMES = "abc"
PEER_LOST = EventName.PEER_LOST
DOCTOR = identity_of(SEED, "doctor").peer_id
RELAY_MBPS = 10.0
LATENCY_S = 0.02
STRANGER = Visitor(Path())


@asynccontextmanager
async def reachable_swarm(
    folder: Path, relay_mbps: float = RELAY_MBPS, founder: Machine | None = None
) -> AsyncIterator[SimulatedSwarm]:
    """Peers that train, dial back and relay, as real ones do."""
    machines = {} if founder is None else {"a": founder}
    async with open_swarm(SEED, toy_spec(500), folder) as swarm:
        await start(swarm, *NAMES, machine_of=machines)
        async with trio.open_nursery() as nursery:
            for peer in swarm.peers.values():
                nursery.start_soon(be_reached, peer.parts, relay_mbps)
            await trio.sleep(1)
            yield swarm
            nursery.cancel_scope.cancel()


async def examined(swarm: SimulatedSwarm, *bootstrap: str) -> Examination:
    async with swarm.internet.open_network(DOCTOR) as network:
        clock_s = swarm.directory.true_time_s() - trio.current_time()
        seen = await Doctor(network, clock_s, STRANGER).examine(bootstrap)
        for name in NAMES:
            members = swarm[name].view.alive(trio.current_time())
            assert DOCTOR not in {member.peer_id for member in members}, "it is no member"
        return seen


def address_of(swarm: SimulatedSwarm, name: str) -> str:
    return swarm[name].network.addresses[0]


@simulated(SEED)
async def test_the_peer_that_is_named_and_two_others_are_met_and_dial_back(tmp_path):
    async with reachable_swarm(tmp_path) as swarm:
        seen = await examined(swarm, address_of(swarm, "a"))
        assert seen.met[0].address == address_of(swarm, "a")
        assert {met.peer_id for met in seen.met} == {swarm[name].peer_id for name in NAMES}
        for met in seen.met:
            assert met.failure is None
            assert met.software == "loco-peer simulated"
            assert met.relays
            assert 2 * LATENCY_S <= met.round_trip_s < 0.2
            assert abs(met.ahead_s) <= met.round_trip_s
        assert (seen.reach, seen.nat) == (Reach.YES, NatKind.NONE)
        (working,), (observed,) = seen.working, seen.observed
        assert working == f"/ip4/{observed}/tcp/{seen.port}"
        await trio.sleep(2 * SILENCE_S)
        for name in NAMES:
            (left,) = swarm[name].events(EventName.PEER_LEFT)
            assert left["remote"] == DOCTOR
            assert all(each["reason"] != "silent" for each in swarm[name].events(PEER_LOST))


@simulated(SEED)
async def test_a_run_that_was_amended_or_has_a_ban_is_looked_at_like_any(tmp_path):
    async with reachable_swarm(tmp_path) as swarm:
        banned = identity_of(SEED, "banned").peer_id
        swarm["a"].links.tell_statements(swarm["a"].parts.admission.rule(Verdict.BAN, banned))
        await swarm.until(lambda: bool(swarm["b"].events(EventName.PEER_RULED_ON)))
        seen = await examined(swarm, address_of(swarm, "a"))
        assert [met.failure for met in seen.met] == [None] * 3


@simulated(SEED)
async def test_a_run_of_the_invited_is_looked_at_with_the_invitation(tmp_path):
    """By the home's own identity: it uses up no place that the peer needs afterwards."""
    spec = toy_spec(500).model_copy(update={"admission": AdmissionSection(mode="invite")})
    async with open_swarm(SEED, spec, tmp_path) as swarm:
        await start(swarm, "a")
        token = swarm["a"].parts.admission.invite(bytes(32), 3600.0, 1)
        home = Home(tmp_path / "home")
        home.prepare()
        visitors = [STRANGER, visitor_of(home, token), visitor_of(home, None)]
        own = load(home.identity_path).peer_id
        for visitor, refused in zip(visitors, (True, False, True), strict=True):
            asks = DOCTOR if visitor is STRANGER else own
            async with swarm.internet.open_network(asks) as network:
                (met,) = (await Doctor(network, 0.0, visitor).examine([address_of(swarm, "a")])).met
            if visitor is visitors[2]:  # its pass is known by now, and it shows none
                assert met.failure is None
                continue
            assert met.refused is refused, met.failure
            assert "--invite" in str(met.failure) or not refused
        assert [v.incarnation for v in visitors[1:]] == [1, 2]


def close_way_in(network: SimulatedNetwork, tried: list[str], patch: pytest.MonkeyPatch) -> None:
    """Let this peer not get through to the doctor."""
    dial = network.probe

    async def probe(address: str) -> str:
        if network._internet.answering_at(address) != DOCTOR:
            return await dial(address)
        tried.append(address)
        raise StreamLost("dial: no answer")

    patch.setattr(network, "probe", probe)


@pytest.mark.parametrize("relay_mbps", [RELAY_MBPS, 0.0])
def test_who_cannot_be_dialled_learns_it_and_who_would_relay(tmp_path, monkeypatch, relay_mbps):
    @simulated(SEED)
    async def run():
        async with reachable_swarm(tmp_path, relay_mbps) as swarm:
            tried: list[str] = []
            for name in NAMES:
                close_way_in(swarm[name].network, tried, monkeypatch)
            seen = await examined(swarm, address_of(swarm, "a"))
            assert (seen.reach, seen.working) == (Reach.NO, ())
            assert f"/ip4/{seen.observed[0]}/tcp/{seen.port}" in tried
            assert [met.relays for met in seen.met] == [relay_mbps > 0] * 3

    run()


@simulated(SEED)
async def test_who_does_not_answer_is_named_with_the_step_that_failed(tmp_path):
    async with reachable_swarm(tmp_path) as swarm:
        swarm.internet.partition([DOCTOR], [swarm["a"].peer_id])
        nobody = f"/ip4/10.9.9.9/tcp/1/p2p/{identity_of(SEED, 'nobody').peer_id}"
        elsewhere = f"/ip4/10.9.9.9/tcp/1/p2p/{swarm['c'].peer_id}"
        bootstrap = [address_of(swarm, "a"), nobody, elsewhere, address_of(swarm, "b")]
        began_s = trio.current_time()
        seen = await examined(swarm, *bootstrap)
        failures = [met.failure for met in seen.met[:4]]
        assert [met.address for met in seen.met[:4]] == bootstrap
        assert "no answer" in str(failures[0])
        assert "connection refused" in str(failures[1])
        assert "nobody answers at" in str(failures[2])
        assert failures[3] is None
        assert seen.reach is Reach.YES, "one that answers suffices"
        assert trio.current_time() - began_s < 3 * ATTEMPT_S


@pytest.mark.parametrize("ahead_s", [-7.0, 7.0])
def test_how_far_our_clock_is_off_is_seen(tmp_path, ahead_s):
    @simulated(SEED)
    async def run():
        async with reachable_swarm(tmp_path, founder=Machine(clock_skew_s=ahead_s)) as swarm:
            seen = await examined(swarm, address_of(swarm, "a"))
            assert seen.met[0].ahead_s == pytest.approx(ahead_s, abs=seen.met[0].round_trip_s)

    run()


# --- how fast a peer sends ------------------------------------------------------------------------
def corpus_in(folder: Path, piece_kib: int) -> tuple[RunSpec, KeptCorpus]:
    """A corpus of some pieces, and the spec of a run that trains on it."""
    data = DataSection(source="tokens:", validation_blocks=2, piece_kib=piece_kib)
    spec = RunSpec(model=ModelSection(context_length=64), data=data)
    tokens = np.random.default_rng(0).integers(0, 256, 3 * piece_kib * 1024).astype(np.uint8)
    np.save(folder / "tokens.npy", tokens)
    kept = prepare_corpus(spec, folder / "made", f"tokens:{folder / 'tokens.npy'}")
    data = data.model_copy(update={"manifest": kept.manifest.name})
    return spec.model_copy(update={"data": data}), kept


def store_of(kept: KeptCorpus, folder: Path, *, whole: bool) -> PieceStore:
    if not whole:
        return PieceStore(folder, kept.manifest)
    corpus = kept.open()
    assert isinstance(corpus, Corpus)
    return PieceStore(folder, kept.manifest, corpus)


async def rate_over(
    folder: Path, bytes_per_s: float, piece_kib: int, *, whole: bool, of_expert: bool = False
) -> LineRate | None:
    """What is measured of a peer with such a line; its corpus may be one expert's of several."""
    spec, kept = corpus_in(folder, piece_kib)
    if of_expert:
        code = {"name": "code", "source": "text:x", "manifest": spec.data.manifest}
        tree = spec.model_dump() | {"experts": [{"name": "general"}, code]}
        tree["data"]["manifest"] = "ab" * 32
        spec = validated(tree)
    internet = SimulatedInternet(
        SEED, link=LinkModel(latency_s=LATENCY_S, bandwidth_bytes_per_s=bytes_per_s)
    )
    founder, work = identity_of(SEED, "a"), SimulatedWork()
    signed = SignedSpec.signed_by(spec, founder.public_key, founder.sign)
    (folder / "manifest").write_bytes(kept.manifest.to_bytes())
    blobs = {kept.manifest.name: folder / "manifest"}
    async with (
        internet.open_network(founder.peer_id) as theirs,
        internet.open_network(DOCTOR) as ours,
    ):
        store = store_of(kept, folder, whole=whole)
        await ContentService(
            network=theirs,
            work=work,
            state_dir=folder,
            signed=signed,
            blobs=blobs,
            stores={store.manifest.name: store},
        ).start()
        await ours.connect(founder.peer_id, theirs.addresses)
        return await rate_of(ours, founder.peer_id)


@pytest.mark.parametrize(("bytes_per_s", "of_expert"), [(1e5, False), (4e6, False), (4e6, True)])
def test_a_piece_of_the_corpus_shows_how_fast_a_peer_sends(tmp_path, bytes_per_s, of_expert):
    @simulated(SEED)
    async def run():
        rate = await rate_over(tmp_path, bytes_per_s, 1024, whole=True, of_expert=of_expert)
        assert rate is not None
        assert rate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.25)
        assert not rate.at_most

    run()


@simulated(SEED)
async def test_a_piece_that_does_not_come_in_time_says_how_fast_the_line_is_at_most(tmp_path):
    rate = await rate_over(tmp_path, 1e4, 1024, whole=True)
    assert rate is not None
    assert rate.at_most
    assert 1e4 < rate.bytes_per_s < 1.01 * 1024 * 1024 / FETCH_S


@pytest.mark.parametrize(("piece_kib", "whole"), [(16, True), (1024, False)])
def test_nothing_is_said_of_a_line_where_pieces_are_small_or_elsewhere(tmp_path, piece_kib, whole):
    @simulated(SEED)
    async def run():
        assert await rate_over(tmp_path, 4e6, piece_kib, whole=whole) is None

    run()
