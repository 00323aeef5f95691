"""How bench/codec.py counts."""

from collections.abc import Callable

import pytest
import torch

from bench import codec, report


def test_every_operation_takes_its_turn_and_the_first_does_not_count() -> None:
    calls: list[str] = []
    operations: dict[tuple[str, str], Callable[[], object]] = {
        codec.MEMCPY: lambda: calls.append("memcpy"),
        ("int8", "encode"): lambda: calls.append("encode"),
    }
    medians = codec.medians_s(operations, 3, "cpu")
    assert calls == ["memcpy", "encode"] * 4
    assert set(medians) == set(operations)


def test_all_codecs_are_measured_on_a_small_vector() -> None:
    found = codec.cpu_rows(1280, 1, 1)
    names = {(row["codec"], row["operation"]) for row in found}
    assert {("int8", "encode"), ("bf16", "decode"), ("int8", "outer step")} < names
    assert next(row for row in found if row["codec"] == "memcpy")["of memcpy"] == 1


def test_measuring_leaves_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    codec.cpu_rows(1280, 1, before + 1)
    assert torch.get_num_threads() == before


def test_goals_compare_with_memcpy_and_with_hiveminds_best() -> None:
    found = report.Report("codec", "")
    found.rows = [codec.row("cpu", 1, "int8", name, 6.0, 10.0) for name in ("encode", "decode")]
    theirs = [
        codec.row("cpu", 1, f"hivemind {name}", operation, rate, 5.0)
        for name, rate in (("Uniform8Bit", 0.25), ("Blockwise", 1.0))
        for operation in ("encode", "decode")
    ]
    codec._add_goals(found)
    codec._add_hivemind_goals(found, theirs, 1)
    assert [goal.measured for goal in found.goals] == pytest.approx([0.6, 0.6, 3, 3])
    assert [goal.met for goal in found.goals] == [True, True, False, False]
