"""Machines with several cards: the table of docs/machines.md is what `loco-peer plan` computes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan_first import plan

from peer.cli.new import preset_spec
from protocol.names import size_text
from protocol.pipeline.question import workload_of
from protocol.pipeline.tables import CARDS, MachineOffer
from protocol.run.needs import card_memory
from protocol.run.run_spec import RunSpec

PAGE = Path(__file__).parents[3] / "docs/machines.md"
PRICES = {"RTX-3090": 0.25, "RTX-4090": 0.5, "A100-80GB": 1.5, "H100": 2.5}
"""Dollars an hour for a card: round figures, as the page says."""
LINKS = {"RTX-3090": "pcie", "RTX-4090": "pcie", "A100-80GB": "nvlink", "H100": "nvlink"}
HEAD = "peer,location,card,gpus,gpu_link,price_per_hour\n"
BOXES = {
    "125m": [("RTX-3090", 1), ("RTX-4090", 1), ("RTX-4090", 4), ("H100", 1), ("H100", 8)],
    "1b": [("RTX-4090", 1), ("RTX-4090", 4), ("A100-80GB", 8), ("H100", 1), ("H100", 8)],
}


def row_of(folder: Path, preset: str, card: str, gpus: int) -> str:
    table = f"{HEAD}a,Iowa,{card},{gpus},{LINKS[card]},{PRICES[card] * gpus}\n"
    answer = json.loads(plan(folder, table, "--json", preset=preset).output)["answer"]
    each = workload_of(preset_spec(preset)).state_bytes_on(gpus)
    memory = f"{size_text(each)} of {CARDS[card].memory_bytes // 10**9}"
    box = f"{gpus} x {card}" + f", {LINKS[card]}" * (gpus > 1)
    return f"| `{preset}` | {box} | {memory} | {answer['hours']:,.1f} | {answer['cost']:,.0f} |"


@pytest.mark.slow
@pytest.mark.parametrize("preset", BOXES)
def test_the_table_of_the_page_is_what_plan_computes(tmp_path: Path, preset: str) -> None:
    rows = [row_of(tmp_path, preset, *box) for box in BOXES[preset]]
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8"), "\n".join(rows)


def test_a_box_of_cards_is_told_as_one_peer(tmp_path: Path) -> None:
    table = f"{HEAD}box,Iowa,RTX 3080,8,pcie,2.0\n"
    said = plan(tmp_path, table, preset="1b").output
    assert said.startswith("This machine: ")
    assert "Cards of box train as one peer: 9.4 GB of training state each at the least" in said
    assert "8 x RTX-3080" in said


def test_cards_share_out_sequences_however_large_a_microbatch_is() -> None:
    whole = workload_of(preset_spec("125m"), sequences=64)
    ones = workload_of(preset_spec("125m"), sequences=1)
    each = MachineOffer("a", "Iowa", 64_000, 4, 0.0, gpus=8)
    assert whole.step_us(each) == ones.step_us(replace(each, compute_us=1_000))
    assert whole.step_us(replace(each, gpus=1)) == 3 * 64_000


LARGE = {
    "3B": (3072, 8192, 28, 24, 8),
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
    "32B": (5120, 27648, 64, 40, 8),
}
"""Width, that of the feed-forward, layers, heads, and those of keys and values."""
FITS = [("3B", 4, 24), ("7B", 8, 24), ("7B", 4, 80), ("13B", 4, 80), ("32B", 8, 80)]


def test_what_fits_cards_is_what_the_page_says() -> None:
    rows = []
    for name, cards, gb in FITS:
        width, inner, layers, heads, kv_heads = LARGE[name]
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_layers": layers}
        model = sizes | {"num_heads": heads, "num_kv_heads": kv_heads, "context_length": 2048}
        tree = {"model": model, "data": {"tokenizer": "gpt2"}, "optimizer": {"name": "muon"}}
        spec = RunSpec.model_validate(tree)
        whole, parts = (
            card_memory(spec, cards, sharded=sharded) / 1e9 for sharded in (False, True)
        )
        assert parts < gb < whole
        rows.append(f"| {name} | {cards} of {gb} GB | {whole:.0f} | {parts:.0f} |")
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8"), "\n".join(rows)


def test_a_box_whose_cards_are_too_small_is_told_to_share_out_weights(tmp_path: Path) -> None:
    table = "peer,location,compute_s,memory_gb,gpus,price_per_hour\nbox,Iowa,1,8,8,2.0\n"
    said = " ".join(plan(tmp_path, table, preset="1b").output.split())
    assert "does not fit a card of box: each has a part of the weights alone" in said
