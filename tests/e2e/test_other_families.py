"""Other families than Llama's with real processes: founded, joined, averaged, exported, loaded."""

from pathlib import Path

import pytest
import torch
from swarm import RUN_SPEC, START_S, Peer, Swarm, open_swarm
from transformers import AutoModelForCausalLM

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode
from protocol.run.families import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def spec_of(family: str) -> str:
    named = RUN_SPEC.replace("[model]", f'[model]\nfamily = "{family}"')
    return named.replace("inner_steps = 150", "inner_steps = 30").replace(
        "[optimizer]", '[optimizer]\nname = "muon"'
    )


def check_export(swarm: Swarm, peer: Peer, folder: Path, family: str) -> None:
    """`export` writes what transformers loads as this family, and it has learnt something."""
    peer.wait_event(EventName.VALIDATED, START_S)
    done = swarm.loco("export", "--hf", str(folder), "--home", str(peer.home.root))
    assert done.returncode == ExitCode.OK, done.stderr
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded).__name__ == FAMILIES[family].architecture
    tokens = torch.frombuffer(bytearray(b"def __init__(self)"), dtype=torch.uint8).long()[None]
    with torch.no_grad():
        loss = loaded(input_ids=tokens, labels=tokens).loss
    assert loss < 5.0, "guessing a byte costs 5.5 nats"


@pytest.mark.long
def test_two_peers_average_and_transformers_loads_the_export(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Mixtral's is that of test_packed_pairs.py."""
    with open_swarm(tmp_path_factory.mktemp("family"), spec_of("qwen3")) as swarm:
        founder = swarm.found()
        joiner = swarm.join(founder)
        for peer, other in ((founder, joiner), (joiner, founder)):
            averaged = peer.wait_event(EventName.ROUND_AVERAGED, START_S)
            assert averaged["partner"] == other.peer_id
        check_export(swarm, joiner, tmp_path / "hf", "qwen3")


def test_an_unknown_family_ends_with_the_nearest_name(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(spec_of("mixtrel"))
    with open_swarm(tmp_path_factory.mktemp("family")) as swarm:
        done = swarm.loco("start", str(tmp_path / "run.toml"), "--home", str(tmp_path / "home"))
    assert done.returncode == ExitCode.USAGE
    assert "model.family: unknown: use one of llama" in done.stderr
    assert "did you mean 'mixtral'?" in done.stderr
