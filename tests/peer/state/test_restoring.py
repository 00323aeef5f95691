"""An upload holds all that a restore needs, and a restore believes none of it unseen."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_worlds import write

from peer.network.identity import Identity, load_or_create
from peer.state.checkpoints import MANIFEST_FILE, OUTER_FILE, CheckpointStore
from peer.state.home import Home, OtherRun
from peer.state.kept_files import AdmissionFile, KeptAdmission
from peer.state.uploads import RestoreFailed, Uploads, restore
from peer.training.corpus.blocks import Corpus, cut_piece, piece_path
from peer.training.corpus.folder import PACKED, kept_corpus, prepare_corpus
from protocol.run.run_spec import RunSpec, parse_toml, validated
from protocol.run.signed_spec import SignedSpec

SPEC = """
name = "restored"
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 2
context_length = 32
[data]
source = "text:{texts}/*.txt"
validation_blocks = 4
"""
ME = "me"
SECRET = b"of the run, 32 bytes in earnest"


def frozen(folder: Path, cache_dir: Path) -> RunSpec:
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"text {number}. " * 50)
    spec = parse_toml(SPEC.format(texts=folder))
    corpus = prepare_corpus(spec, cache_dir)
    digest = corpus.manifest.tokenizer_digest
    frozen = {"manifest": corpus.manifest_digest, "tokenizer_digest": digest}
    section = spec.data.model_copy(update=frozen)
    return spec.model_copy(update={"data": section})


class Uploaded:
    """A home with a run, and the place that it copies to."""

    def __init__(
        self, folder: Path, url: str, as_run: Callable[[RunSpec], RunSpec] = lambda spec: spec
    ) -> None:
        self.home = Home(folder / "home")
        self.home.prepare()
        self.url = url
        spec = as_run(frozen(folder / "texts", self.home.cache_dir))
        founder: Identity = load_or_create(self.home.founder_key_path)
        load_or_create(self.home.identity_path)
        self.signed = SignedSpec.signed_by(spec, founder.public_key, founder.sign)
        self.home.bind_run(self.signed)
        kept = KeptAdmission(self.signed.run_id, SECRET, b"own pass", (b"statement",))
        AdmissionFile(self.home.admission_path).write(kept)
        self.store = CheckpointStore(self.home.checkpoints_dir, keep=9)

    def upload(self, step: float, *, keys: bool = False, keep: int = 3, part: str = "model") -> str:
        uploads = Uploads(self.url, ME, keep, self.home, keys=keys)
        checkpoint = write(self.store, float(step), run_id=self.signed.run_id, part=part)
        where = uploads.copy(checkpoint)
        uploads.copy_data(lambda: None)
        return where


@pytest.fixture
def uploaded(tmp_path) -> Uploaded:
    return Uploaded(tmp_path, str(tmp_path / "there"))


@pytest.fixture
def empty(tmp_path) -> Home:
    home = Home(tmp_path / "empty")
    home.prepare()
    return home


def restored_steps(home: Home) -> list[float]:
    store = CheckpointStore(home.checkpoints_dir, keep=3)
    found = list(store.newest_first(lambda _, why: pytest.fail(why)))
    for checkpoint in found:
        checkpoint.verify()
    return [checkpoint.manifest.step for checkpoint in found]


def corpus_file(uploaded: Uploaded, home: Home) -> Path:
    return home.cache_dir / f"corpus-{uploaded.signed.spec().data.manifest}" / PACKED


def test_an_empty_home_gets_all_but_keys(uploaded, empty):
    uploaded.upload(10)
    uploaded.upload(20)
    said = list(restore(uploaded.url, empty, 3))
    assert restored_steps(empty) == [20]
    assert empty.run() == uploaded.signed
    assert "corpus: whole" in said
    there = corpus_file(uploaded, uploaded.home).read_bytes()
    assert corpus_file(uploaded, empty).read_bytes() == there
    admission = AdmissionFile(empty.admission_path).read()
    assert admission == KeptAdmission(uploaded.signed.run_id, statements=(b"statement",))
    assert not empty.identity_path.exists()
    assert not empty.founder_key_path.exists()


def two_experts(spec: RunSpec) -> RunSpec:
    code = {"name": "code", "source": "text:code", "manifest": spec.data.manifest}
    more = {"experts": [{"name": "general"}, code], "ensemble": {"branch_round": 0}}
    return validated(spec.model_dump() | more)


def test_a_home_that_is_restored_goes_on_with_its_expert(tmp_path, empty):
    uploaded = Uploaded(tmp_path, str(tmp_path / "there"), two_experts)
    uploaded.upload(10, part="expert/1")
    list(restore(uploaded.url, empty, 3))
    assert restored_steps(empty) == [10]
    assert empty.expert() == "code"
    assert corpus_file(uploaded, empty).is_file()
    empty.put_run_away()
    assert empty.expert() is None


def test_copies_of_the_expert_that_is_named_are_taken(tmp_path, empty):
    uploaded = Uploaded(tmp_path, str(tmp_path / "there"), two_experts)
    uploaded.upload(90, part="expert/1")
    for step in (10, 20, 30):
        uploaded.upload(step, part="expert/0")
    list(restore(uploaded.url, empty, 3, "code"))
    assert restored_steps(empty) == [90], "a copy of each expert outlasts older ones"
    assert empty.expert() == "code"
    (own,) = empty.checkpoints_dir.iterdir()
    own.rename(own.with_name("000004-step-30"))  # as the copy that comes now
    list(restore(uploaded.url, empty, 3, "general"))
    assert empty.expert() == "general"
    assert restored_steps(empty) == [30, 90]
    empty.keep_expert("code")
    (said,) = restore(uploaded.url, empty, 3)
    assert "not needed" in said
    assert "of step 90" in said


def test_an_expert_of_which_there_are_no_copies_is_named(tmp_path, empty):
    uploaded = Uploaded(tmp_path, str(tmp_path / "there"), two_experts)
    uploaded.upload(10, part="expert/0")
    with pytest.raises(RestoreFailed, match="no whole checkpoint of the expert 'code'"):
        list(restore(uploaded.url, empty, 3, "code"))


def test_a_home_that_has_the_run_goes_on_from_its_own_checkpoint(uploaded, empty):
    """A container starts with the same command again, whether the uploads can be read or not."""
    uploaded.upload(10)
    list(restore(uploaded.url, empty, 3))
    uploaded.upload(20)
    for url, why in ((uploaded.url, "of step 20"), (f"{uploaded.url}/nowhere", "cannot be read")):
        (said,) = restore(url, empty, 3)
        assert said.startswith("not needed: this home has the run")
        assert why in said
        assert restored_steps(empty) == [10]


def test_a_home_that_has_the_run_and_no_checkpoint_is_filled(uploaded, empty):
    uploaded.upload(10)
    empty.bind_run(uploaded.signed)
    list(restore(uploaded.url, empty, 3))
    assert restored_steps(empty) == [10]


def test_a_home_whose_own_checkpoints_are_all_torn_is_filled(uploaded, empty):
    uploaded.upload(10)
    list(restore(uploaded.url, empty, 3))
    (own,) = empty.checkpoints_dir.iterdir()
    torn = own.rename(own.with_name("000009-step-90"))
    (torn / OUTER_FILE).write_bytes(b"torn")
    assert not [line for line in restore(uploaded.url, empty, 3) if "not needed" in line]
    store = CheckpointStore(empty.checkpoints_dir, keep=3)
    found = store.newest_whole(uploaded.signed.run_id, lambda *_: None)
    assert found is not None
    assert found.manifest.step == 10


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_home_of_another_run_stays_as_it_is(uploaded, empty, has_checkpoint):
    uploaded.upload(10)
    key = load_or_create(empty.founder_key_path)
    other = SignedSpec.signed_by(uploaded.signed.spec(), key.public_key, key.sign)
    empty.bind_run(other)
    if has_checkpoint:
        write(CheckpointStore(empty.checkpoints_dir, keep=3), 5.0, run_id=other.run_id)
    with pytest.raises(OtherRun, match="another run .* give it a --home of its own"):
        list(restore(uploaded.url, empty, 3))
    assert restored_steps(empty) == [5] * has_checkpoint


def test_keys_come_where_they_were_asked_for(uploaded, empty):
    uploaded.upload(10, keys=True)
    list(restore(f"{uploaded.url}/{ME}", empty, 3))  # the folder of one peer does too
    for name in ("identity.key", "founder.key", "admission"):
        assert (empty.root / name).read_bytes() == (uploaded.home.root / name).read_bytes()
        assert (empty.root / name).stat().st_mode & 0o777 == 0o600


def test_no_key_or_secret_lies_there_unasked(uploaded):
    uploaded.upload(10)
    secrets = [
        uploaded.home.identity_path.read_bytes(),
        uploaded.home.founder_key_path.read_bytes(),
        SECRET,
    ]
    for path in Path(uploaded.url).rglob("*"):
        assert path.is_dir() or not any(secret in path.read_bytes() for secret in secrets), path


def test_what_a_digest_names_is_copied_once(uploaded, monkeypatch):
    uploaded.upload(10)
    uploads = Uploads(uploaded.url, ME, 3, uploaded.home)
    monkeypatch.setattr(uploads._files, "put_file", lambda *_: pytest.fail("copied again"))
    uploads.copy_data(lambda: None)


def test_pieces_of_a_corpus_are_restored_one_by_one(uploaded, empty):
    kept = kept_corpus(uploaded.home.cache_dir, str(uploaded.signed.spec().data.manifest))
    assert kept is not None
    corpus = kept.open()
    assert isinstance(corpus, Corpus)
    piece = cut_piece(corpus.train, kept.manifest, 0)
    piece_path(kept.folder, 0).write_bytes(piece)
    (kept.folder / PACKED).unlink()
    uploaded.upload(10)
    said = list(restore(uploaded.url, empty, 3))
    assert any(line.startswith("corpus: 1 of ") for line in said)


def test_a_damaged_corpus_does_not_count(uploaded, empty):
    uploaded.upload(10)
    (path,) = Path(uploaded.url).rglob(PACKED)
    data = bytearray(path.read_bytes())
    data[-3000] ^= 1
    path.write_bytes(data)
    said = list(restore(uploaded.url, empty, 3))
    assert any("is damaged, and left out" in line for line in said)
    assert not corpus_file(uploaded, empty).exists()


@pytest.mark.parametrize("name", [MANIFEST_FILE, OUTER_FILE])
def test_of_a_torn_upload_the_one_before_is_taken(uploaded, empty, name):
    uploaded.upload(10)
    (Path(uploaded.upload(20)) / name).unlink()
    list(restore(uploaded.url, empty, 3))
    assert restored_steps(empty) == [10]


def test_a_later_step_stays_whenever_it_was_uploaded(uploaded, empty):
    for step in (30, 10, 20):
        uploaded.upload(step, keep=1)
    list(restore(uploaded.url, empty, 3))
    assert restored_steps(empty) == [30]


def test_the_upload_of_another_run_is_not_removed(uploaded):
    Uploads(uploaded.url, ME, 1, uploaded.home).copy(write(uploaded.store, 99.0))
    uploaded.upload(10, keep=1)
    with pytest.raises(RestoreFailed, match="of 2 runs"):
        list(restore(uploaded.url, Home(Path(uploaded.url)), 3))


def test_a_place_without_a_checkpoint_says_so(tmp_path, empty):
    with pytest.raises(RestoreFailed, match="there is nothing at"):
        list(restore(str(tmp_path / "nowhere"), empty, 3))
    (tmp_path / "bare").mkdir()
    with pytest.raises(RestoreFailed, match="holds no whole checkpoint"):
        list(restore(str(tmp_path / "bare"), empty, 3))
    with pytest.raises(RestoreFailed, match="cannot restore from nope"):
        list(restore("nope://bucket/run", empty, 3))


def test_an_upload_of_before_says_what_to_do(uploaded, empty):
    uploaded.upload(10)
    (path,) = Path(uploaded.url).rglob("run.json")
    path.unlink()
    with pytest.raises(RestoreFailed, match="an older loco-peer made this upload"):
        list(restore(uploaded.url, empty, 3))
    assert empty.run() is None


def test_a_run_that_was_changed_is_refused(uploaded, empty):
    uploaded.upload(10)
    (path,) = Path(uploaded.url).rglob("run.json")
    fields = json.loads(path.read_text())
    fields["spec"] = fields["spec"].replace("restored", "replaced")
    path.write_text(json.dumps(fields))
    with pytest.raises(RestoreFailed, match="damaged"):
        list(restore(uploaded.url, empty, 3))


def test_of_an_upload_that_was_changed_the_one_before_is_taken(uploaded, empty):
    uploaded.upload(10)
    path = Path(uploaded.upload(20)) / OUTER_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = list(restore(uploaded.url, empty, 3))
    assert restored_steps(empty) == [10]
    assert "is torn (outer.safetensors has" in said[0]
