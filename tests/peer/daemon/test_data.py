"""Where the corpus of a run comes from on this machine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.daemon.data import freeze_data, obtain_data
from peer.ports.simulated import SimulatedWork
from peer.training.corpus import PreparedCorpus
from protocol.errors import InvalidRunSpec
from protocol.run.run_spec import DataSection, ModelSection, RunSpec


class Peer:
    """Gives blobs as a peer's fetcher does."""

    def __init__(self, corpus: PreparedCorpus) -> None:
        self._blobs = corpus.blobs
        self.asked: list[str] = []

    async def blob(self, digest: str) -> bytes:
        self.asked.append(digest)
        return self._blobs[digest].read_bytes()


async def founded(folder: Path) -> tuple[RunSpec, PreparedCorpus]:
    np.save(folder / "tokens.npy", np.arange(2000) % 250)
    spec = RunSpec(
        model=ModelSection(context_length=8),
        data=DataSection(source=f"tokens:{folder / 'tokens.npy'}", validation_blocks=2),
    )
    return await freeze_data(spec, folder / "founder", SimulatedWork())


async def obtained(spec: RunSpec, cache: Path, peer: Any, data: str | None = None):
    cache.mkdir(exist_ok=True)
    return await obtain_data(spec, cache, peer, SimulatedWork(), data)


async def test_a_joiner_takes_manifest_and_held_out_blocks_and_keeps_them(tmp_path: Path) -> None:
    spec, corpus = await founded(tmp_path)
    peer = Peer(corpus)
    taken = await obtained(spec, tmp_path / "joiner", peer)
    assert taken.manifest_digest == spec.data.manifest
    assert taken.kept.whole is None
    assert set(peer.asked) == set(corpus.blobs)
    again = await obtained(spec, tmp_path / "joiner", peer)
    assert again.num_blocks == corpus.num_blocks
    assert len(peer.asked) == 2
    assert set(again.blobs) == set(corpus.blobs)


async def test_what_the_user_has_is_taken_if_it_is_the_runs(tmp_path: Path) -> None:
    spec, corpus = await founded(tmp_path)
    peer, copy = Peer(corpus), tmp_path / "copy.npy"
    copy.write_bytes((tmp_path / "tokens.npy").read_bytes())
    taken = await obtained(spec, tmp_path / "joiner", peer, str(copy))
    assert (taken.kept.whole, peer.asked) == (copy, [])
    np.save(copy, np.arange(2000) % 249)
    with pytest.raises(InvalidRunSpec, match="another corpus"):
        await obtained(spec, tmp_path / "other", peer, f"tokens:{copy}")
    with pytest.raises(InvalidRunSpec, match="must be a file"):
        await obtained(spec, tmp_path / "other", peer, str(tmp_path / "nowhere.npy"))


async def test_a_corpus_cut_for_another_run_is_refused(tmp_path: Path) -> None:
    spec, corpus = await founded(tmp_path)
    longer = spec.model_copy(update={"model": ModelSection(context_length=16)})
    with pytest.raises(InvalidRunSpec, match="cut for another run spec"):
        await obtained(longer, tmp_path / "joiner", Peer(corpus))
