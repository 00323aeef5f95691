"""Where the corpus of a run comes from on this machine."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from peer.daemon import provision as data_module
from peer.daemon.provision import freeze_data, obtain_data
from peer.options.config import load_config
from peer.state.home import HomeError
from peer.training.corpus.folder import KeptCorpus
from protocol.errors import InvalidRunSpec
from protocol.run.amendments import differing_keys
from protocol.run.run_spec import DataSection, ModelSection, RunSpec
from simulation.work import SimulatedWork


class Peer:
    """Gives blobs as a peer's fetcher does."""

    def __init__(self, corpus: KeptCorpus) -> None:
        self._blobs = corpus.blobs
        self.asked: list[str] = []

    async def blob(self, digest: str) -> bytes:
        self.asked.append(digest)
        return self._blobs[digest].read_bytes()


async def founded(folder: Path) -> tuple[RunSpec, KeptCorpus]:
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
    assert taken.whole is None
    assert set(peer.asked) == set(corpus.blobs)
    again = await obtained(spec, tmp_path / "joiner", peer)
    assert again.manifest.num_blocks == corpus.manifest.num_blocks
    assert len(peer.asked) == 2
    assert set(again.blobs) == set(corpus.blobs)


async def test_what_the_user_has_is_taken_if_it_is_the_runs(tmp_path: Path) -> None:
    spec, corpus = await founded(tmp_path)
    peer, copy = Peer(corpus), tmp_path / "copy.npy"
    copy.write_bytes((tmp_path / "tokens.npy").read_bytes())
    taken = await obtained(spec, tmp_path / "joiner", peer, str(copy))
    assert (taken.whole, peer.asked) == (copy, [])
    np.save(copy, np.arange(2000) % 249)
    with pytest.raises(InvalidRunSpec, match="another corpus"):
        await obtained(spec, tmp_path / "other", peer, f"tokens:{copy}")
    with pytest.raises(InvalidRunSpec, match="there is no such file"):
        await obtained(spec, tmp_path / "other", peer, str(tmp_path / "nowhere.npy"))


async def test_a_corpus_cut_for_another_run_is_refused(tmp_path: Path) -> None:
    spec, corpus = await founded(tmp_path)
    longer = spec.model_copy(update={"model": ModelSection(context_length=16)})
    with pytest.raises(InvalidRunSpec, match="cut for another run spec"):
        await obtained(longer, tmp_path / "joiner", Peer(corpus))


async def test_a_disk_that_is_full_is_told_with_its_folder(tmp_path: Path, monkeypatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(data_module, "prepare_corpus", fill)
    said = f"{tmp_path / 'founder'}: No space left on device; make room"
    with pytest.raises(HomeError, match=said):
        await founded(tmp_path)


async def test_a_text_that_cannot_be_read_is_told_by_its_name(tmp_path: Path, monkeypatch) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("words " * 100)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    spec = RunSpec(data=DataSection(source=f"text:{tmp_path}/*.txt"))
    said = rf"cannot read {tmp_path}/a\.txt: Permission denied; let this user read it"
    with pytest.raises(InvalidRunSpec, match=said):
        await freeze_data(spec, tmp_path / "founder", SimulatedWork())


async def test_a_joiner_that_cannot_keep_what_it_is_given_says_so(tmp_path: Path) -> None:
    spec, corpus = await founded(tmp_path)
    place = tmp_path / "joiner" / f"corpus-{spec.data.manifest}"
    place.parent.mkdir()
    place.write_text("in the way")
    with pytest.raises(HomeError, match=f"cannot be kept in {place}: File exists"):
        await obtained(spec, tmp_path / "joiner", Peer(corpus))
    tokenised = {"tokenizer_digest": "2" * 32}
    spec = spec.model_copy(update={"data": spec.data.model_copy(update=tokenised)})
    peer = Peer(corpus)
    peer._blobs["2" * 32] = tmp_path / "tokens.npy"
    with pytest.raises(HomeError, match="nowhere"):
        await obtain_data(spec, tmp_path / "nowhere", peer, SimulatedWork())


def refuse(*_: object) -> None:
    raise AssertionError("no tokenizer runs here")


@pytest.mark.slow
async def test_a_tokenizer_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data_module, "prepare_corpus", refuse)
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a b " * 100)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = f"text:{tmp_path}/*.txt"
    data = DataSection(
        source=source, tokenizer=str(tmp_path / "tokenizer.json"), validation_blocks=2
    )
    spec = RunSpec(model=ModelSection(context_length=8), data=data)
    frozen, made = await freeze_data(spec, tmp_path / "founder", SimulatedWork())
    peer = Peer(made)
    peer._blobs[made.manifest.tokenizer_digest] = tmp_path / "tokenizer.json"
    taken = await obtained(frozen, tmp_path / "joiner", peer, source)
    assert taken.manifest_digest == made.manifest_digest
    assert peer.asked == [made.manifest.tokenizer_digest]


async def test_a_founders_tokenizer_runs_on_nothing_that_the_user_has_not_named(
    tmp_path: Path, monkeypatch
) -> None:
    """The standard library is here too, and would be tokenised for hours by a hostile one."""
    spec, corpus = await founded(tmp_path)
    for name in ("prepare_corpus", "prepare_in_child"):
        monkeypatch.setattr(data_module, name, refuse)
    update = {"source": "stdlib", "tokenizer_digest": "2" * 32}
    spec = spec.model_copy(update={"data": spec.data.model_copy(update=update)})
    peer = Peer(corpus)
    peer._blobs["2" * 32] = tmp_path / "tokens.npy"
    taken = await obtained(spec, tmp_path / "joiner", peer)
    assert taken.whole is None


async def with_documents(folder: Path, **data: Any) -> int | None:
    """The token that a founder writes into its run spec, for attention to end at."""
    data = {"source": f"text:{folder}/*.txt", "mask_documents": True, **data}
    section = DataSection.model_validate({"validation_blocks": 1, **data})
    spec = RunSpec(model=ModelSection(context_length=8), data=section)
    frozen, _ = await freeze_data(spec, folder / "founder", SimulatedWork())
    assert RunSpec.model_validate(frozen.model_dump()) == frozen
    assert differing_keys(frozen, spec) == [], "it can be started with its file again"
    return frozen.data.document_end


async def test_the_founder_says_which_token_ends_a_document(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a b " * 100)
    assert await with_documents(tmp_path) == 0
    assert await with_documents(tmp_path, mask_documents=False) is None


@pytest.mark.slow
async def test_documents_that_nothing_ends_are_refused(tmp_path: Path) -> None:
    """Neither by a tokenizer that has such a token, nor in a file of tokens."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a b " * 100)
    vocabulary = {"a": 0, "b": 1}
    found = []
    for more in ({}, {"</s>": 2}):
        tokenizer = Tokenizer(models.WordLevel(vocabulary | more, unk_token="a"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(path := tmp_path / f"tokenizer-{len(more)}.json"))
        found.append({"tokenizer": str(path)})
    assert await with_documents(tmp_path, **found[1]) == 2
    np.save(tmp_path / "tokens.npy", np.arange(2000) % 200 + 1)
    endless = {"source": f"tokens:{tmp_path / 'tokens.npy'}"}
    for data, what in ((found[0], "a token that ends one"), (endless, "the token that ends one")):
        with pytest.raises(InvalidRunSpec, match=f"is followed by {what}: leave the key out"):
            await with_documents(tmp_path, **data)


async def test_documents_are_not_masked_in_a_file_of_conversations(tmp_path: Path) -> None:
    """Whose turns may end with the token that elsewhere ends a document."""
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 400)
    said = "{{ m.content }}{% generation %}\0{% endgeneration %}"
    template = "{% for m in messages %}" + said + "{% endfor %}"
    section = DataSection(
        source=f"chat:{tmp_path}/a.jsonl", validation_blocks=1, chat_template=template
    )
    spec = RunSpec(model=ModelSection(context_length=8), data=section)
    _, chats = await freeze_data(spec, tmp_path / "founder", SimulatedWork())
    with pytest.raises(InvalidRunSpec, match="holds conversations"):
        await with_documents(tmp_path, source=f"tokens:{chats.whole}")


def test_of_several_gpus_the_fullest_is_told(tmp_path: Path, monkeypatch) -> None:
    """Those that train, whichever the first one is."""
    free = {0: 10, 1: 80, 2: 30}
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free[device.index], 80))

    def told(**options: str) -> tuple[int | None, int]:
        room = data_module.free_room(load_config({"home": tmp_path, **options}, {}), tmp_path)
        return room.gpu, room.gpus

    assert told() == (10, 1)
    assert told(device="cuda:1") == (80, 1)
    assert told(gpus="1,2") == (30, 2)
    assert told(gpus="all") == (10, 3)
    assert told(gpus="2", device="cpu") == (None, 1)
