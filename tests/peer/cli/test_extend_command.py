"""`loco-peer extend`: a run spec that goes on with a home's model, beside an export of that."""

from pathlib import Path
from typing import Any

import pytest
from test_export_command import SPEC, home_of, keep, loco
from transformers import AutoModelForCausalLM

from peer.cli.extend import _admission, _admitting, successor
from peer.cli.new import EXTENDED, EXTENDED_LINES, preset_spec, toml_of
from peer.network.identity import Identity
from peer.options.exit_codes import ExitCode
from peer.state.home import Home
from peer.state.kept_files import AdmissionFile, KeptAdmission
from peer.training.corpus.folder import prepare_corpus
from peer.training.init_from import with_checkpoint
from protocol.admission.statements import Ruling, Successor, Token, Verdict
from protocol.run.amendments import MODE, TOTAL_STEPS, Amendment
from protocol.run.run_spec import RunSpec, parse_toml, validated
from protocol.run.signed_spec import SignedSpec

MODEL = Path("/models/next")


def extended(home: Home, toml: Path, *more: str, data: str = "text:more/*.txt") -> Any:
    options = ("--home", str(home.root), "--data", data, "--steps", "400")
    return loco("extend", str(toml), *options, *more)


@pytest.mark.parametrize("preset", ["demo", "125m"])
def test_a_successor_is_its_parent_but_for_data_length_and_rates(preset: str) -> None:
    parent = preset_spec(preset, seed=7)
    child = successor(parent, MODEL, "text:more/*.txt", 400, 0.25, "tokens:old")
    assert parent.optimizer.muon is not None
    assert child.optimizer.muon is not None
    assert child.optimizer.learning_rate == parent.optimizer.learning_rate / 2
    assert child.optimizer.muon.learning_rate == (parent.optimizer.muon.learning_rate or 0) / 2
    assert (child.optimizer.warmup_steps, child.training.total_steps) == (4, 400)
    assert child.model.init_from == str(MODEL)
    assert child.model.context_length == parent.model.context_length
    assert child.data.sources == ("text:more/*.txt", "tokens:old")
    assert child.data.replay_share == 0.25
    assert "tokenizer" not in child.data.model_fields_set, "it is the checkpoint's"
    assert (child.sync, child.seed) == (parent.sync, 7)
    alone = successor(parent, MODEL, "text:more/*.txt", 400, 0.0, "tokens:old")
    assert alone.data.sources == ("text:more/*.txt",)


def test_what_the_founders_machine_found_out_of_the_parent_is_left_out() -> None:
    tree = preset_spec("lora", model="some/model").model_dump()
    tree["data"] |= {"manifest": "m" * 32, "tokenizer_digest": "bytes"}
    tree["adapter"] |= {"base": "b" * 32}
    tree["admission"] |= {"mode": "invite", "secret_digest": "d" * 64}
    child = successor(validated(tree), MODEL, "chat:more/*.jsonl", 400, 0.1, "tokens:old")
    assert (child.data.manifest, child.data.tokenizer_digest, child.frozen) == (None, None, None)
    assert child.adapter is not None
    assert child.adapter.base is None
    assert (child.admission.mode, child.admission.secret_digest) == ("invite", None)


@pytest.mark.parametrize("mode", ["invite", "list", "open"])
@pytest.mark.parametrize("founded", ["invite", "list", "open"])
def test_the_guests_of_a_private_run_are_on_the_list_of_the_next(
    tmp_path: Path, founded: str, mode: str
) -> None:
    """They come with their identities, and an invitation is good for one run."""
    founder, guest, banned, other, listed = (Identity(bytes([each]) * 32) for each in range(1, 6))
    peers = [] if founded == "open" else [banned.peer_id, listed.peer_id]
    admission = {"mode": founded, "peers": peers}
    spec = validated(preset_spec("demo").model_dump() | {"admission": admission})
    signed = SignedSpec.signed_by(spec, founder.public_key, founder.sign)
    home = Home(tmp_path)
    home.prepare()
    home.bind_run(signed)
    run_id, key, sign = signed.run_id, founder.public_key, founder.sign
    token = Token.made(run_id, 2**31, 2, seed=bytes(32), signer=key, sign=sign)
    changes = ((MODE, mode), (TOTAL_STEPS, 900))
    statements = (
        Ruling.made(run_id, Verdict.ADMIT, other.peer_id, 1, key, sign).sealed,
        Ruling.made(run_id, Verdict.BAN, banned.peer_id, 1, key, sign).sealed,
        *(token.pass_for(each.peer_id).sealed for each in (guest, banned)),
        Amendment.made(run_id, 1, 2, changes, key, sign).sealed,
        Successor.made(
            run_id, 1, "cd" * 16, f"/ip4/1.2.3.4/tcp/1/p2p/{other.peer_id}", key, sign
        ).sealed,
    )
    AdmissionFile(home.admission_path).write(KeptAdmission(signed.run_id, statements=statements))
    child = successor(spec, MODEL, "text:more/*.txt", 400, 0.1, "tokens:old")
    admitting = _admitting(child, *_admission(home))
    guests = {other.peer_id, *[guest.peer_id] * (mode == "invite"), *peers} - {banned.peer_id}
    assert admitting.admission.mode == mode, "as it is by now"
    assert admitting.admission.peers == (() if mode == "open" else tuple(sorted(guests)))
    assert parse_toml(toml_of(admitting, EXTENDED)) == admitting


@pytest.mark.parametrize("data", ["text:more/*.txt", "chat:more/*.jsonl"])
def test_a_model_that_speaks_by_a_template_goes_on_speaking_by_it(data: str) -> None:
    """Its exports tell others of it; and old conversations may have to be written anew."""
    tree = preset_spec("sft", model="some/model", data="chat:old/*.jsonl").model_dump()
    tree["data"] |= {"chat_template": "{{ messages }}\n\U0001f600"}
    child = successor(validated(tree), MODEL, data, 400, 0.1, "tokens:old")
    assert child.data.chat_template == "{{ messages }}\n\U0001f600"
    assert parse_toml(toml_of(child, EXTENDED)) == child


def test_documents_stay_masked_but_where_conversations_come_that_nothing_ends() -> None:
    parent = preset_spec("125m")
    data = parent.data.model_copy(update={"mask_documents": True, "document_end": 3})
    parent = parent.model_copy(update={"data": data})
    child = successor(parent, MODEL, "text:more/*.txt", 400, 0.25, "tokens:old")
    assert (child.data.mask_documents, child.data.document_end) == (True, None)
    child = successor(parent, MODEL, "chat:more/*.jsonl", 400, 0.25, "tokens:old")
    assert not child.data.mask_documents


@pytest.mark.slow
def test_extend_exports_the_model_and_writes_a_spec_that_begins_from_it(tmp_path: Path) -> None:
    old, more = tmp_path / "old.txt", tmp_path / "more.txt"
    old.write_text("An old text.\n" * 16_000)
    more.write_text("Something new.\n" * 16_000)
    home = Home(tmp_path / "home")
    home.prepare()
    spec = RunSpec.model_validate({**SPEC.model_dump(), "data": {"source": f"text:{old}"}})
    corpus = prepare_corpus(spec, home.cache_dir)
    frozen = spec.data.model_copy(update={"manifest": corpus.manifest_digest})
    home = home_of(spec.model_copy(update={"data": frozen}), home.root)
    keep(home, 200, 2.0)
    ran = extended(home, tmp_path / "next.toml", data=f"text:{more}")
    assert ran.exit_code == ExitCode.OK, ran.stderr
    start = f"loco-peer start {tmp_path / 'next.toml'}"
    assert f"{start} --new-run\n" in ran.stdout
    assert f"{start} --home DIR, and then here: loco-peer amend --successor DIR" in ran.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "next")
    assert all((each == 2.0).all() for each in model.parameters())
    text = (tmp_path / "next.toml").read_text()
    assert "\n".join(EXTENDED_LINES) in text
    child = with_checkpoint(parse_toml(text))
    assert child.data.tokenizer == "bytes"
    assert child.data.replay == f"tokens:{corpus.whole}", "the very tokens that it had"
    assert prepare_corpus(child, home.cache_dir).manifest.num_tokens > corpus.manifest.num_tokens
    again = extended(home, tmp_path / "next.toml", data=f"text:{more}")
    assert (again.exit_code, "exists already" in again.stderr) == (ExitCode.USAGE, True)
    forced = extended(home, tmp_path / "next.toml", "--force", "--replay", "0", data=f"text:{more}")
    assert forced.exit_code == ExitCode.OK, forced.stderr
    assert parse_toml((tmp_path / "next.toml").read_text()).data.replay is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parent", "data", "sentence"),
    [
        ({}, "more/*.txt", "unknown data source"),
        ({"pipeline": {"stages": 2}}, "text:x", "a run with stages cannot begin from a checkpoint"),
        ({"experts": [{"name": "a"}, {"name": "b", "source": "stdlib"}]}, "text:x", "[[experts]]"),
    ],
    ids=["source", "stages", "experts"],
)
def test_what_cannot_be_extended_is_told_and_nothing_written(
    tmp_path: Path, parent: dict[str, Any], data: str, sentence: str
) -> None:
    spec = preset_spec("demo", stages=parent.get("pipeline", {}).get("stages", 1))
    home = home_of(validated(spec.model_dump() | {"ensemble": None} | parent), tmp_path / "home")
    keep(home, 200, 2.0)
    home.keep_expert("a")
    ran = extended(home, tmp_path / "next.toml", data=data)
    assert (ran.exit_code, sentence in ran.stderr) == (ExitCode.USAGE, True), ran.stderr
    assert not (tmp_path / "next.toml").exists()
    assert not (tmp_path / "next").exists()
