"""A corpus that peers fetch from each other piece by piece, and the founder killed half-way."""

from pathlib import Path

import numpy as np
import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm, all_averaging, open_swarm, wait_until

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]

PIECE_KIB = 64
COMING_S = 240.0


def spec_of(tokens: Path, piece_kib: int) -> str:
    data = f'[data]\nsource = "tokens:{tokens}"\npiece_kib = {piece_kib}\n'
    return RUN_SPEC.replace("[data]\n", data)


def tokens_in(folder: Path, num_bytes: int) -> Path:
    """A file of tokens with something to learn in it: each comes twice."""
    path = folder / "tokens.npy"
    tokens = np.random.default_rng(1).integers(0, 256, num_bytes // 2, dtype=np.uint8)
    np.save(path, np.repeat(tokens, 2))
    return path


def here(peer: Peer) -> int:
    return int(peer.metric("loco_corpus_pieces", where="here"))


def run_without_the_founder(swarm: Swarm, pieces: int, share: float) -> None:
    """Three join; the founder is killed when nobody needs it; one more joins, and all go on.

    Args:
        share: of the pieces that a joiner has at most when it begins its first round.
    """
    founder = swarm.found()
    joiners = [swarm.join(founder) for _ in range(3)]
    for joiner in joiners:
        joiner.wait_event(EventName.ROUND_OPENED, START_S)
        assert here(joiner) <= share * pieces
    all_averaging(joiners)
    needed = lambda: founder.metric("loco_corpus_pieces", where="only_here")
    wait_until(
        lambda: needed() == 0,
        "all pieces are somewhere else too",
        timeout_s=COMING_S,
        poll_s=0.5,
        peers=[founder, *joiners],
    )
    founder.kill()
    late = swarm.join(joiners[0])
    all_averaging([*joiners, late], 2)
    everybody = [*joiners, late]
    held = {peer.name: here(peer) for peer in everybody}
    waited = {peer.name: peer.metric("loco_corpus_wait_seconds_total") for peer in everybody}
    print(f"pieces {pieces}; held {held}; waited {waited}")
    for peer in everybody:
        assert peer.events(EventName.VALIDATED)[-1]["loss"] < np.log(256)
        assert not peer.events(EventName.TRAINER_DIED), peer.report()
        assert not peer.events(EventName.PIECE_FAILED), peer.report()
    assert late.metric("loco_corpus_fetched_bytes_total") > 0


def test_peers_train_on_a_corpus_that_only_its_founder_had(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = Path(tmp_path_factory.mktemp("pieces"))
    tokens = tokens_in(folder, 2 << 20)
    with open_swarm(folder, spec_of(tokens, PIECE_KIB)) as swarm:
        run_without_the_founder(swarm, (2 << 20) // (PIECE_KIB * 1024), share=1.0)


@pytest.mark.long
def test_a_gigabyte_in_pieces(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pieces of the usual size. By the end of a first round of 50 steps a joiner has about 140 of
    the 256, and on a busy machine nearly all, for its line is no slower."""
    folder = Path(tmp_path_factory.mktemp("gigabyte"))
    size = 1 << 30
    spec = spec_of(tokens_in(folder, size), 4096).replace("inner_steps = 150", "inner_steps = 50")
    with open_swarm(folder, spec) as swarm:
        run_without_the_founder(swarm, size >> 22, share=0.9)
