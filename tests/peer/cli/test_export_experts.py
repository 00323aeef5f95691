"""`loco-peer export` and `generate` of a run with experts, asked of a home's daemon or of none."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_worlds import write
from ensemble_worlds import export_of, flat_model, run_with
from test_export_command import home_of
from transformers import AutoModelForCausalLM, MixtralForCausalLM
from typer.testing import CliRunner, Result

from peer.cli import client
from peer.cli.app import app
from peer.content.state_file import write_state
from peer.observe.control import ControlFailed
from peer.options.exit_codes import ExitCode
from peer.state.checkpoints import CheckpointStore
from peer.state.ensemble_reader import ExpertEnsemble
from peer.state.export_folder import ENSEMBLE_FILE, MARKER
from peer.state.home import Home
from peer.training.corpus.folder import prepare_corpus
from peer.training.model import FlatModel
from protocol.run.layout import part_of_expert
from protocol.run.run_spec import RunSpec
from protocol.wire.content_messages import StateScalars

pytestmark = pytest.mark.slow

PROMPT = "def "
OWN = 1
WORDS = ("the quick brown fox ", "return self.value\n", "x squared plus y ")


def loco(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@dataclass
class World:
    """A home, and the weights that it and others have: of each expert, by its number."""

    home: Home
    run: RunSpec
    models: list[FlatModel]
    gone: set[int] = field(default_factory=set)
    said: dict[int, list[float]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def ask(self, _home: Home, request: str, _s: float, **wanted: Any) -> dict[str, Any]:
        if request == "score_text":
            self.asked.append(request)
            assert wanted["tokens"] == list(PROMPT.encode())
            numbers = {part: int(part[-1]) for part in wanted["parts"]}
            told = {part: self.said[n] for part, n in numbers.items() if n in self.said}
            failed = {part: "nobody holds it" for part, n in numbers.items() if n not in self.said}
            return {"log_probs": told, "failed": failed}
        if request == "write_state":
            path, theta_P = self.home.state_dir / "now.state", self._weights(OWN)
            scalars = StateScalars("ab" * 16, 3, 180, self.models[OWN].layout.digest, 0, 0, 99, 0.5)
            write_state(path, scalars, theta_P, np.zeros_like(theta_P))
            return {"path": str(path), "part": part_of_expert(OWN), "round": 3, "tokens": 99}
        assert request == "fetch_weights"
        number = int(wanted["part"][-1])
        self.asked.append(self.run.experts[number].name)
        if number in self.gone:
            raise ControlFailed(f"no peer that we see holds expert {number}")
        path, theta_P = self.home.state_dir / f"expert-{number}.f32", self._weights(number)
        assert wanted["padded_parameters"] == theta_P.size
        theta_P.tofile(path)
        return {"path": str(path), "round": 5, "tokens": 77}

    def _weights(self, number: int) -> np.ndarray:
        return self.models[number].theta_P.detach().numpy()

    def keep(self, number: int) -> None:
        """A checkpoint of this expert, in the home."""
        signed, layout = self.home.run(), self.models[number].layout
        assert signed is not None
        write(
            CheckpointStore(self.home.checkpoints_dir, keep=5),
            0.25,
            step=100.0 + number,
            part=part_of_expert(number),
            run_id=signed.run_id,
            layout_digest=layout.digest,
            padded_parameters=layout.padded_parameters,
        )

    def loco(self, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> Result:
        """A command beside the daemon."""
        monkeypatch.setattr(client, "ask_daemon", self.ask)
        with self.home.locked():
            return self.alone(*arguments)

    def alone(self, command: str, *arguments: str) -> Result:
        return loco(command, "--home", str(self.home.root), *arguments)


def with_corpora(run: RunSpec, folder: Path) -> RunSpec:
    """The same run with texts of each domain, kept in the cache of the home."""
    tree, manifests = run.model_dump(), []
    for name, line in zip(tree["experts"], WORDS, strict=True):
        (folder / f"{name['name']}.txt").write_text(line * 300)
        name["source"] = f"text:{folder}/{name['name']}.txt"
    tree["data"] |= {"source": tree["experts"][0]["source"], "validation_blocks": 4}
    tree["experts"][0]["source"] = None
    run = RunSpec.model_validate(tree)
    for number in range(len(run.experts)):
        made = prepare_corpus(run.of_expert(number), folder / "home" / "cache")
        manifests.append(made.manifest_digest)
    data = run.data.model_copy(update={"manifest": manifests[0]})
    experts = tuple(
        expert.model_copy(update={"manifest": manifest})
        for expert, manifest in zip(run.experts, manifests, strict=True)
    )
    return run.model_copy(update={"data": data, "experts": experts})


def world_of(
    folder: Path, run: RunSpec, model_of: Callable[[RunSpec, int], FlatModel] = flat_model
) -> World:
    home = home_of(run, folder / "home")
    home.keep_expert(run.experts[OWN].name)
    models = [model_of(run.of_expert(n), n) for n in range(len(run.experts))]
    return World(home, run, models)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return world_of(tmp_path, run_with())


def weights_in(folder: Path) -> Mapping[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def is_of(folder: Path, model: FlatModel) -> bool:
    state = weights_in(folder)
    flat = torch.cat([state[entry.name].flatten() for entry in model.layout.entries])
    ours = [model.theta_P[e.offset : e.offset + e.size] for e in model.layout.entries]
    return bool((flat == torch.cat(ours)).all())


# --- export ---------------------------------------------------------------------------------------
def test_each_expert_is_written_and_all_answer_together(world, tmp_path, monkeypatch) -> None:
    ran = world.loco("export", "--hf", str(tmp_path / "hf"), monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert world.asked == ["general", "math"]
    for number, expert in enumerate(world.run.experts):
        assert is_of(tmp_path / "hf" / expert.name, world.models[number])
    told = json.loads((tmp_path / "hf" / ENSEMBLE_FILE).read_text())
    assert told["rules"] == {
        "discount": 1.0,
        "fixed_share": 0.01,
        "top": 2,
        "anchor": "general",
    }
    assert [(each["name"], each["round"], each["tokens"]) for each in told["experts"]] == [
        ("general", 5, 77),
        ("code", 3, 99),
        ("math", 5, 77),
    ]
    assert ExpertEnsemble(tmp_path / "hf").loss("some text") > 0
    assert [path.name for path in world.home.state_dir.iterdir()] == ["now.state"]
    again = world.loco("export", "--hf", str(tmp_path / "hf"), monkeypatch=monkeypatch)
    assert again.exit_code == ExitCode.OK, again.stderr


def test_an_expert_that_nobody_has_is_named_and_the_others_are_taken_when_asked_for(
    world, tmp_path, monkeypatch
) -> None:
    world.gone = {2}
    hf = ("--hf", str(tmp_path / "hf"))
    ran = world.loco("export", *hf, monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.FAILURE
    assert "math: no peer that we see holds expert 2" in ran.stderr
    assert "take the others alone: --experts general,code" in ran.stderr
    assert not (tmp_path / "hf").exists()
    assert [path.name for path in world.home.state_dir.iterdir()] == ["now.state"]
    ran = world.loco("export", *hf, "--experts", "general,code", monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert ExpertEnsemble(tmp_path / "hf").names == ["general", "code"]


def test_where_nobody_has_it_the_checkpoint_of_this_home_counts(
    world, tmp_path, monkeypatch
) -> None:
    world.gone = {2}
    world.keep(2)
    ran = world.loco("export", "--hf", str(tmp_path / "hf"), monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert "holds expert 2: taking the newest checkpoint of expert/2" in ran.stderr
    assert all((each == 0.25).all() for each in weights_in(tmp_path / "hf" / "math").values())


def test_without_a_daemon_a_home_has_what_it_has_trained(world, tmp_path) -> None:
    hf = ("--hf", str(tmp_path / "hf"))
    ran = world.alone("export", *hf)
    assert ran.exit_code == ExitCode.NO_DAEMON
    world.keep(OWN)
    ran = world.alone("export", *hf)
    assert ran.exit_code == ExitCode.FAILURE
    assert "general: no daemon is running" in ran.stderr
    assert "--experts code" in ran.stderr
    ran = world.alone("export", *hf, "--experts", "math")
    assert ran.exit_code == ExitCode.NO_DAEMON
    assert "no checkpoint either" in ran.stderr
    ran = world.alone("export", *hf, "--experts", "code")
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert (tmp_path / "hf" / "code" / MARKER).is_file()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--experts", "cod"], "no expert 'cod', but general, code, math; did you mean 'code'?"),
        (["--experts", ""], "no expert ''"),
        (["--swarm", "--experts", "code"], "--swarm exports the mean of this home's own expert"),
        (["--swarm", "--as-moe"], "--swarm exports the mean of this home's own expert"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    world, tmp_path, monkeypatch, arguments, sentence
) -> None:
    hf = ("--hf", str(tmp_path / "hf"))
    ran = world.loco("export", *hf, *arguments, monkeypatch=monkeypatch)
    assert (ran.exit_code, sentence in ran.stderr) == (ExitCode.USAGE, True), ran.stderr


def test_a_run_of_one_model_has_no_experts_to_export(tmp_path: Path, monkeypatch) -> None:
    home = home_of(RunSpec(), tmp_path / "home")
    for option in (("--as-moe",), ("--experts", "code")):
        with home.locked():
            ran = loco("export", "--home", str(home.root), "--hf", str(tmp_path / "hf"), *option)
        assert ran.exit_code == ExitCode.USAGE
        assert "this run has one model: leave --experts and --as-moe out" in ran.stderr


@pytest.mark.parametrize("name", ["..", ".", ".hidden"])
def test_a_name_that_leads_out_of_the_folder_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="String should match pattern"):
        run_with(("general", name))


# --- as one mixture -------------------------------------------------------------------------------
def trained(spec: RunSpec, _: int) -> FlatModel:
    """The same model for each expert: it has seen the words of all domains."""
    model = flat_model(spec, 0)
    model.theta_P /= 8
    tokens = torch.tensor([list((words * 3).encode()[:33]) for words in WORDS])
    optimizer = torch.optim.Adam([model.theta_P], lr=0.02)
    for _ in range(30):
        model.gradient_P.zero_()
        model.loss(tokens).backward()
        model.theta_P.grad = model.gradient_P
        optimizer.step()
    return model


def turned(model: FlatModel, spec: RunSpec) -> FlatModel:
    """A model that says the same, with its hidden values in another order."""
    order = torch.from_numpy(np.random.default_rng(3).permutation(spec.model.hidden_size))
    for entry in model.layout.entries:
        values = model.theta_P[entry.offset : entry.offset + entry.size].view(entry.shape)
        of_rows = entry.name.endswith(("o_proj.weight", "down_proj.weight", "norm.weight"))
        values.copy_(values[order] if of_rows else values[:, order])
    return model


def test_a_mixture_that_is_no_worse_is_written(tmp_path: Path, monkeypatch) -> None:
    world = world_of(tmp_path, with_corpora(run_with(), tmp_path), trained)
    ran = world.loco("export", "--hf", str(tmp_path / "hf"), "--as-moe", monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.OK, ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert rows[0] == ["general", "code", "math", "mean"]
    assert [row[0] for row in rows[1:6]] == ["general", "code", "math", "ensemble", "mixture"]
    assert len({tuple(loss.rstrip("*") for loss in row[1:]) for row in rows[1:6]}) == 1, (
        "all are the same model"
    )
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), MixtralForCausalLM)
    assert [path.name for path in world.home.state_dir.iterdir()] == ["now.state"]
    wrote = loco("generate", "--hf", str(tmp_path / "hf"), "--prompt", "the", "--tokens", "3")
    assert wrote.exit_code == ExitCode.OK, wrote.stderr


def test_a_mixture_that_is_worse_than_the_best_expert_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    def model_of(spec: RunSpec, number: int) -> FlatModel:
        model = trained(spec, number)
        return turned(model, spec) if number == 2 else model

    world = world_of(tmp_path, with_corpora(run_with(), tmp_path), model_of)
    ran = world.loco("export", "--hf", str(tmp_path / "hf"), "--as-moe", monkeypatch=monkeypatch)
    lines = [line.rstrip("* ").split() for line in ran.stdout.splitlines()[1:6]]
    rows = {line[0]: line[-1] for line in lines}
    assert rows["general"] == rows["code"] == rows["math"], "they say the same"
    assert float(rows["mixture"]) > float(rows["math"])
    assert ran.exit_code == ExitCode.FAILURE
    assert f"as one mixture the experts have a loss of {rows['mixture']}, worse than" in ran.stderr
    assert not (tmp_path / "hf").exists()


def test_without_held_out_text_nothing_is_merged(world, tmp_path: Path, monkeypatch) -> None:
    ran = world.loco("export", "--hf", str(tmp_path / "hf"), "--as-moe", monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.FAILURE
    assert "the held-out text of general is not in" in ran.stderr


def test_experts_of_unequal_sizes_make_no_mixture(tmp_path: Path, monkeypatch) -> None:
    run = run_with(models={"math": {"num_layers": 1}})
    world = world_of(tmp_path, with_corpora(run, tmp_path))
    ran = world.loco("export", "--hf", str(tmp_path / "hf"), "--as-moe", monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.FAILURE
    assert "--as-moe: general has num_hidden_layers = 2 and math 1" in ran.stderr
    assert not (tmp_path / "hf").exists()


# --- generate -------------------------------------------------------------------------------------
def text_of(folder: Path, tokens: int, seed: int = 0) -> str:
    ensemble = ExpertEnsemble(folder)
    written = list(ensemble.continued(PROMPT, tokens, seed=seed))
    return ensemble.tokenizer.decode(written, skip_special_tokens=True)


def test_an_export_of_experts_is_continued_by_all(tmp_path: Path) -> None:
    folder = export_of(tmp_path / "hf", run_with())
    ran = loco("generate", "--hf", str(folder), "--prompt", PROMPT, "--tokens", "9", "--seed", "4")
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert ran.stdout == text_of(folder, 9, 4) + "\n"
    cut = loco("generate", "--hf", str(folder), "--prompt", PROMPT, "--without-stages", "1")
    assert "not cut into stages" in cut.stderr
    one = loco("generate", "--hf", str(folder / "code"), "--prompt", PROMPT, "--tokens", "3")
    assert one.exit_code == ExitCode.OK, one.stderr


def test_the_best_two_by_what_peers_say_of_the_prompt_are_fetched_and_mixed(
    world, tmp_path, monkeypatch
) -> None:
    world.said = {0: [-2.0, -2.0, -2.0], 1: [-5.0, -5.0, -5.0], 2: [-1.0, -3.0, -1.0]}
    arguments = ("generate", "--prompt", PROMPT, "--tokens", "9")
    ran = world.loco(*arguments, monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert world.asked == ["score_text", "general", "math"]
    folder = export_of(tmp_path / "two", world.run, numbers=(0, 2))
    assert ran.stdout == text_of(folder, 9) + "\n"
    assert [path.name for path in world.home.state_dir.iterdir()] == ["now.state"]


def test_an_expert_of_which_nobody_answers_is_left_out(world, monkeypatch) -> None:
    world.said = {1: [-5.0, -5.0, -5.0]}
    arguments = ("generate", "--prompt", PROMPT, "--tokens", "3")
    ran = world.loco(*arguments, monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert "general is left out: nobody holds it" in ran.stderr
    assert world.asked == ["score_text"], "its own weights are here"
    world.said = {}
    ran = world.loco(*arguments, monkeypatch=monkeypatch)
    assert ran.exit_code == ExitCode.FAILURE
    assert "no expert says what it makes of the prompt" in ran.stderr


def test_without_a_daemon_the_experts_of_this_home_answer(world) -> None:
    world.keep(OWN)
    ran = world.alone("generate", "--prompt", PROMPT, "--tokens", "3")
    assert ran.exit_code == ExitCode.OK, ran.stderr
    assert "the experts that this home has answer" in ran.stderr


@pytest.mark.parametrize("prompt", ["", "x" * 32])
def test_a_prompt_that_leaves_no_room_is_refused_before_anybody_is_asked(
    world, monkeypatch, prompt
) -> None:
    ran = world.loco("generate", "--prompt", prompt, monkeypatch=monkeypatch)
    assert (ran.exit_code, "read 32 at once" in ran.stderr) == (ExitCode.USAGE, True), ran.stderr
    assert not world.asked
