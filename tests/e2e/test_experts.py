"""Two experts of two sizes in one swarm of real processes, each trained by those that name it."""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from swarm import INNER_STEPS, RUN_SPEC, START_S, Peer, Swarm, open_swarm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from peer.observe.event_names import EventName
from peer.state.ensemble_reader import ExpertEnsemble
from protocol.membership.group import Group

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LAYERS: Final = {"general": 1, "code": 2}
LINES: Final = {
    "general": "the quick brown fox {} jumps\n",
    "code": "def f{0}(x): return x + {0}\n",
}
LINES_EACH: Final = 1500
STEPS_A_ROUND: Final = 50
EVERY: Final = ("--checkpoint-every", "2")
STILL: Final = "warmup_steps", "learning_rate = 1e-9\nwarmup_steps"
"""No step moves a weight by more than rounding does."""


def spec_in(folder: Path, *, branch_round: int = 0) -> str:
    for name, line in LINES.items():
        (folder / f"{name}.txt").write_text("".join(map(line.format, range(LINES_EACH))))
    own = RUN_SPEC.replace("[data]", f'[data]\nsource = "text:{folder}/general.txt"')
    own = own.replace(f"inner_steps = {INNER_STEPS}", f"inner_steps = {STEPS_A_ROUND}")
    return f"""{own}
[ensemble]
branch_round = {branch_round}

[[experts]]
name = "general"

[[experts]]
name = "code"
source = "text:{folder}/code.txt"
model = {{ num_layers = {LAYERS["code"]} }}
"""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("experts")
    with open_swarm(folder, spec_in(folder)) as swarm:
        swarm.found()
        yield swarm


def join(swarm: Swarm, via: Peer, name: str) -> Peer:
    arguments = ("join", "--bootstrap", via.address, "--expert", "code")
    return swarm.launch(name, *arguments, *EVERY)


def coder(swarm: Swarm) -> Peer:
    """One that trains the other expert: of an earlier test, or a new one."""
    others = [peer for peer in swarm.members if peer is not swarm.founder]
    peer = others[0] if others else join(swarm, swarm.founder, f"code{len(swarm.started)}")
    peer.wait_event(EventName.ROUND_CLOSED, START_S)
    return peer


def test_each_expert_is_trained_by_its_own_peers_and_a_killed_one_comes_back(
    experts: Swarm, tmp_path: Path
) -> None:
    founder = experts.founder
    run_id = founder.status()["run_id"]
    first = join(experts, founder, "code1")
    first.wait_event(EventName.ROUND_CLOSED, START_S, round=1)
    assert not first.events(EventName.STATE_RECEIVED), "nobody had begun that expert"
    second = join(experts, founder, "code2")
    for peer, other in ((first, second), (second, first)):
        averaged = peer.wait_event(EventName.ROUND_AVERAGED, START_S)
        assert averaged["partner"] == other.peer_id
    (received,) = second.events(EventName.STATE_RECEIVED)
    assert received["remotes"] == [first.peer_id]
    for peer, number, name in ((founder, 0, "general"), (first, 1, "code"), (second, 1, "code")):
        status = peer.status()
        assert (status["part"], status["expert"]) == (f"expert/{number}", name)
        assert len(status["peers"]) == 2, "one roster"
        (entered,) = peer.events(EventName.GROUP_ENTERED)
        assert entered["group"] == Group(run_id, f"expert/{number}").digest
    first.wait_event(EventName.CHECKPOINT_WRITTEN, START_S)
    first.kill()
    second.kill()
    step = founder.status()["step"]
    back = experts.launch("code1", "start", *EVERY)
    resumed = back.wait_event(EventName.RUN_RESUMED, START_S)
    assert resumed["step"] > 0
    back.wait_event(EventName.ROUND_CLOSED, START_S, round=resumed["round"] + 2)
    assert back.status()["expert"] == "code"
    founder.wait_for("it trains on", lambda: founder.status()["step"] > step, START_S)
    assert not founder.events(EventName.ROUND_AVERAGED), "it is the only one of its expert"


@pytest.mark.long
def test_the_steps_of_one_expert_are_amended(experts: Swarm, tmp_path: Path) -> None:
    founder, key = experts.founder, "experts.code.training.total_steps"
    home = str(founder.home.root)
    (tmp_path / "longer.toml").write_text(
        '[[experts]]\nname = "code"\ntraining.total_steps = 900000\n'
    )
    told = experts.loco("amend", str(tmp_path / "longer.toml"), "--home", home)
    assert told.returncode == 0, told.stderr
    assert f"{key}: 1000000 -> 900000" in told.stdout
    founder.wait_event(EventName.RUN_AMENDED, keys=[key])
    assert f"{key} = 900000" in experts.loco("amend", "--show", "--home", home).stdout
    steps = {name: each["total_steps"] for name, each in experts_of(founder).items()}
    assert steps == {"general": 1000000, "code": 900000}


@pytest.mark.long
def test_all_are_exported_from_one_home_and_answer_together(experts: Swarm, tmp_path: Path) -> None:
    founder, folder = experts.founder, tmp_path / "hf"
    coder(experts)
    home = ("--home", str(founder.home.root))
    ran = experts.loco("export", *home, "--hf", str(folder), timeout_s=START_S)
    assert ran.returncode == 0, ran.stderr
    ensemble = ExpertEnsemble(folder)
    layers = [model.config.num_hidden_layers for model in ensemble.models]
    assert dict(zip(ensemble.names, layers, strict=True)) == LAYERS
    assert ensemble.loss("def f7(x): return x + 7") < 1.1 * math.log(256)
    said = ("--prompt", "def f7(x): ret", "--tokens", "8", "--temperature", "0")
    ran = experts.loco("generate", *home, *said, timeout_s=START_S)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert "left out" not in ran.stderr


def test_a_joiner_is_told_the_names(experts: Swarm) -> None:
    given = ("--expert", "cod")
    peer = experts.launch("lost", "join", "--bootstrap", experts.founder.address, *given)
    assert peer.wait_exit(START_S) == 2, peer.report()
    assert "no expert 'cod', but general, code; did you mean 'code'?" in peer.stderr


@pytest.mark.long
def test_a_newcomer_takes_the_expert_whose_only_peer_was_killed(experts: Swarm) -> None:
    founder, first = experts.founder, coder(experts)
    written = first.wait_event(EventName.CHECKPOINT_WRITTEN, START_S)
    founder.wait_for("it is told", lambda: experts_of(founder)["code"]["peers"] == 1, START_S)
    count = len(founder.events())
    first.kill()
    stands = founder.wait_event(EventName.EXPERT_STANDS, START_S, after=count)
    assert stands["expert"] == "code"
    assert experts_of(founder)["code"]["stands"]
    holder = experts.launch(first.name, "start", "--expert", "general")
    received = holder.wait_event(EventName.STATE_RECEIVED, START_S)
    assert received["remotes"] == [founder.peer_id]
    third = experts.launch("free", "join", "--bootstrap", founder.address)
    begun = third.wait_event(EventName.EXPERT_BEGUN, START_S)
    assert (begun["expert"], begun["weights"]) == ("code", "kept"), "nobody trains it"
    assert third.wait_event(EventName.ROUND_OPENED, START_S)["step"] >= written["step"]
    assert (holder.status()["expert"], third.status()["expert"]) == ("general", "code")
    founder.wait_for("it goes on", lambda: not experts_of(founder)["code"]["stands"], START_S)
    for peer in (third, holder):
        peer.kill()


def experts_of(peer: Peer) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in peer.status()["experts"]}


@pytest.mark.long
def test_held_out_blocks_outlive_the_founder_and_missing_texts_are_told(experts: Swarm) -> None:
    """The last of the swarm's tests, for it kills the founder."""
    first = coder(experts)
    corpora = sorted(path.name for path in experts.founder.home.cache_dir.glob("corpus-*"))
    assert len(corpora) == 2
    first.wait_for("both domains", lambda: _domains(first) == corpora, START_S)
    experts.founder.kill()
    arguments = ("join", "--bootstrap", first.address, "--expert", "general")
    late = experts.launch("late", *arguments)
    told = late.wait_event(EventName.CORPUS_UNHELD, START_S)
    assert told["remotes"] == [first.peer_id]
    assert "pieces of the corpus of the expert 'general'" in told["detail"]
    assert "corpus-unheld" in [problem["name"] for problem in late.status()["problems"]]
    assert _domains(late) == corpora, "the founder was not needed for these"
    assert "texts with --data" in late.stderr
    for peer in (first, late):
        peer.kill()


def _domains(peer: Peer) -> list[str]:
    """Corpora of which a peer's cache has the manifest and the held-out blocks."""
    found = peer.home.cache_dir.glob("corpus-*/held-out")
    return sorted(path.parent.name for path in found if (path.parent / "manifest").is_file())


@pytest.mark.long
def test_at_the_branch_one_of_two_goes_over_in_a_new_process(tmp_path: Path) -> None:
    one_size = f"model = {{ num_layers = {LAYERS['code']} }}\n"
    spec = spec_in(tmp_path, branch_round=9).replace(one_size, "")
    with open_swarm(tmp_path, spec) as swarm:
        founder = swarm.found(rounds_alone=0)
        home = ("--home", str(founder.home.root))
        swarm.loco("pause", *home, timeout_s=START_S)  # it would be at the branch soon
        joiner = swarm.launch("joiner", "join", "--bootstrap", founder.address)
        peers = (founder, joiner)
        joiner.wait_event(EventName.STATE_RECEIVED, START_S)
        swarm.loco("resume", *home, timeout_s=START_S)
        experts = lambda: sorted(str(peer.status()["expert"]) for peer in peers)
        begun = lambda: [e for peer in peers for e in peer.events(EventName.EXPERT_BEGUN)]
        (event,) = founder.wait_for("one goes over", begun, 3 * START_S)
        assert event["expert"] == "code"
        assert event["weights"] == "generalist's"
        assert "our checkpoint of step" in event["detail"]
        founder.wait_for("both train", lambda: experts() == ["code", "general"], START_S)


def test_a_founder_names_the_domain_that_cannot_be_used(tmp_path: Path) -> None:
    with open_swarm(tmp_path, spec_in(tmp_path)) as swarm:
        (tmp_path / "code.txt").write_text("short\n")
        path = tmp_path / "run.toml"
        path.write_text(spec_in_place(tmp_path))
        peer = swarm.launch("founder", "start", os.fspath(path))
        assert peer.wait_exit(START_S) == 2, peer.report()
        assert "expert code: data.source: " in peer.stderr
        assert "use more text or fewer blocks" in peer.stderr
        assert not list(peer.home.cache_dir.glob("corpus-*")), "nothing is made before"


def spec_in_place(folder: Path) -> str:
    short, spec = (folder / "code.txt").read_text(), spec_in(folder)
    (folder / "code.txt").write_text(short)
    return spec


def llama_of(folder: Path) -> LlamaForCausalLM:
    """A checkpoint of bytes in Hugging Face format, as somebody else has trained it."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS["code"],
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.long
def test_an_expert_begins_from_a_checkpoint_that_only_the_founder_has(tmp_path: Path) -> None:
    theirs = llama_of(tmp_path / "theirs").state_dict()
    begins = f'name = "code"\nbegin = "{tmp_path}/theirs"'
    spec = spec_in(tmp_path).replace('name = "code"', begins)
    with open_swarm(tmp_path, spec.replace(*STILL)) as swarm:
        swarm.found()
        shutil.move(tmp_path / "theirs", tmp_path / "gone")
        peer = join(swarm, swarm.founder, "code1")
        assert peer.wait_event(EventName.EXPERT_BEGUN, START_S)["weights"] == "its checkpoint's"
        peer.wait_event(EventName.CHECKPOINT_WRITTEN, START_S)
        folder = tmp_path / "export"
        ran = swarm.loco("export", "--home", str(peer.home.root), "--hf", str(folder))
        assert ran.returncode == 0, ran.stderr
        ours = AutoModelForCausalLM.from_pretrained(folder / "code").state_dict()
        for name, weights in theirs.items():
            torch.testing.assert_close(ours[name], weights, atol=2e-3, rtol=0)
