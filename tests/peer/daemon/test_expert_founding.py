"""What a founder finds out of the domains of experts, before any model is made."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from peer.daemon.provision import RealProvision
from peer.options.config import load_config
from peer.state.home import Home
from peer.training.corpus.folder import prepare_corpus
from protocol.errors import InvalidRunSpec
from protocol.run.amendments import differing_keys
from protocol.run.run_spec import RunSpec, validated
from protocol.schedule.progress import nobody
from simulation.work import SimulatedWork

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200


def spec_of(folder: Path, **code: Any) -> RunSpec:
    (folder / "general.txt").write_text(TEXT)
    return validated(
        {
            "model": {"context_length": 8},
            "data": {"source": f"text:{folder}/general.txt", "validation_blocks": 2},
            "experts": [{"name": "general"}, {"name": "code", **code}],
            "ensemble": {"branch_round": 0},
        }
    )


async def found(spec: RunSpec, folder: Path) -> None:
    """As a founder that has no process to make models in."""
    home, spare = Home(folder / "home"), Any
    home.prepare()
    config = load_config({"home": home.root}, {})
    provision = RealProvision(config, home, "me", SimulatedWork(), spare, nobody)  # type: ignore[arg-type]
    await provision.found(spec, 0 if spec.experts else None)


async def test_a_domain_with_too_little_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "code.txt").write_text("short")
    with pytest.raises(InvalidRunSpec, match="expert code: data: .* use more text"):
        await found(spec_of(tmp_path, source=f"text:{tmp_path}/code.txt"), tmp_path)


async def test_tokens_of_another_tokenizer_are_refused_and_named(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "fox": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    spec = spec_of(tmp_path, source="text:unused")
    data = spec.data.model_copy(update={"tokenizer": str(tmp_path / "tokenizer.json")})
    (tmp_path / "words").mkdir()
    theirs = prepare_corpus(spec.of_expert(0).model_copy(update={"data": data}), tmp_path / "words")
    code = spec_of(tmp_path, source=f"tokens:{theirs.whole}")
    with pytest.raises(InvalidRunSpec, match="expert code: .* made with another tokenizer than"):
        await found(code, tmp_path)


@pytest.mark.parametrize("who", ["experts", "stages"])
async def test_tokens_of_conversations_are_refused_by_those_who_learn_whole_texts(
    tmp_path: Path, who: str
) -> None:
    chats = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": chats}) + "\n") * 400)
    spec = spec_of(tmp_path, source="text:unused")
    data = spec.data.model_copy(update={"source": f"chat:{tmp_path}/a.jsonl"})
    theirs = prepare_corpus(spec.of_expert(0).model_copy(update={"data": data}), tmp_path / "chats")
    source = f"tokens:{theirs.whole}"
    run = spec_of(tmp_path, source=source)
    if who == "stages":
        whole = run.of_expert(1).model_dump()
        run = validated(whole | {"sync": {"inner_steps": 9}, "pipeline": {"stages": 2}})
    with pytest.raises(InvalidRunSpec, match=f"{source} holds conversations, and {who} learn whol"):
        await found(run, tmp_path)


def test_what_a_founder_finds_out_of_experts_is_no_difference(tmp_path: Path) -> None:
    written = spec_of(tmp_path, source="text:code.txt")
    found_out = written.experts[1].model_copy(update={"manifest": "ab" * 32})
    founding = written.model_copy(update={"experts": (written.experts[0], found_out)})
    assert differing_keys(founding, written) == []
    longer = spec_of(tmp_path, source="text:code.txt", training={"total_steps": 7})
    assert differing_keys(founding, longer) == ["experts.code.training.total_steps"]
