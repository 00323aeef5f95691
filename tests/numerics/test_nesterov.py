"""The outer step of DiLoCo against its equations, torch's optimizer, and itself elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import pytest
import torch

from peer.averaging.diloco.nesterov import (
    ChunkValues,
    NesterovFactors,
    WeightedCodes,
    average_codes,
    state_digest,
    step_pieces,
)
from peer.codec import TILE, get_codec

C = 384
PAPER = NesterovFactors(learning_rate=0.4, momentum=0.9)
SIZES = [C, pytest.param(TILE + 256, marks=pytest.mark.slow)]


def _vectors(count: int, num_values: int = C, seed: int = 0) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).standard_normal((count, num_values), dtype=np.float32)


def _codes(name: str, vector: npt.NDArray[Any]) -> torch.Tensor:
    codec = get_codec(name)
    codes = torch.empty(codec.code_bytes(vector.size), dtype=torch.uint8)
    codec.encode(torch.from_numpy(vector), codes)
    return codes


def _decoded(name: str, codes: torch.Tensor, num_values: int = C) -> npt.NDArray[Any]:
    values = torch.empty(num_values)
    get_codec(name).decode(codes, values)
    return values.numpy()


def _state(seed: int = 0, num_values: int = C) -> ChunkValues:
    phi, v = _vectors(2, num_values, seed)
    return ChunkValues(torch.from_numpy(phi.copy()), torch.from_numpy(v.copy()))


def _average(
    name: str, vectors: npt.NDArray[Any], shares: list[float], num_values: int = C
) -> torch.Tensor:
    given = [
        WeightedCodes(_codes(name, vector), share)
        for vector, share in zip(vectors, shares, strict=True)
    ]
    out = torch.empty_like(given[0].codes)
    average_codes(given, get_codec(name), num_values, out)
    return out


def _same_bits(one: torch.Tensor | npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return np.asarray(one).tobytes() == other.tobytes()


def _plain_step(
    phi: npt.NDArray[Any], v: npt.NDArray[Any], D: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The equations, one rounded operation after the other."""
    lr, mu = np.float32(PAPER.learning_rate), np.float32(PAPER.momentum)
    v = mu * v + D
    return phi - lr * (D + mu * v), v


# --- the step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "int8"])
@pytest.mark.parametrize("num_values", SIZES)
def test_has_the_bits_of_the_equations(name, num_values):
    codec, state = get_codec(name), _state(0, num_values)
    phi, v = (vector.numpy().copy() for vector in (state.phi_C, state.v_C))
    for pseudo_gradient in _vectors(3, num_values, 1):
        codes = _codes(name, pseudo_gradient)
        phi, v = _plain_step(phi, v, _decoded(name, codes, num_values))
        step_pieces([(state, state)], codes, codec, PAPER)
        assert _same_bits(state.phi_C, phi)
        assert _same_bits(state.v_C, v)


def test_is_torchs_sgd_with_nesterov_momentum():
    state = ChunkValues(torch.from_numpy(_vectors(1)[0].copy()), torch.zeros(C))
    parameter = torch.nn.Parameter(state.phi_C.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.4, momentum=0.9, nesterov=True)
    for pseudo_gradient in 0.01 * _vectors(100, seed=1):
        parameter.grad = torch.from_numpy(pseudo_gradient)
        optimizer.step()
        step_pieces([(state, state)], _codes("fp32", pseudo_gradient), get_codec("fp32"), PAPER)
        torch.testing.assert_close(state.phi_C, parameter.detach(), atol=1e-6, rtol=0)


def test_can_be_taken_again_with_another_result():
    codec, before, after = get_codec("int8"), _state(), _state(5)
    first, second = (_codes("int8", vector) for vector in _vectors(2, seed=1))
    step_pieces([(before, after)], first, codec, PAPER)
    step_pieces([(before, after)], second, codec, PAPER)
    untouched = _state()
    assert torch.equal(before.phi_C, untouched.phi_C)
    assert torch.equal(before.v_C, untouched.v_C)
    step_pieces([(untouched, untouched)], second, codec, PAPER)
    assert torch.equal(after.phi_C, untouched.phi_C)
    assert torch.equal(after.v_C, untouched.v_C)


@pytest.mark.parametrize("broken", ["codes", "v", "after", "type"])
def test_what_does_not_fit_is_refused_and_nothing_written(broken):
    codec, state, codes = get_codec("int8"), _state(), _codes("int8", _vectors(1, seed=1)[0])
    before = ChunkValues(state.phi_C, state.v_C[:256]) if broken == "v" else state
    after = ChunkValues(state.phi_C[:256], state.v_C) if broken == "after" else state
    if broken == "type":
        after = ChunkValues(state.phi_C, state.v_C.double())
    with pytest.raises(ValueError, match=r"codes|values|fp32"):
        step_pieces([(before, after)], codes[:-1] if broken == "codes" else codes, codec, PAPER)
    assert torch.equal(state.phi_C, _state().phi_C)
    assert torch.equal(state.v_C, _state().v_C)


# --- the average ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "int8"])
@pytest.mark.parametrize("shares", [[1, 1, 1], [1, 0.3, 1], [0, 0.7, 1], [2**-40, 1, 0.1]])
@pytest.mark.parametrize("num_values", SIZES)
def test_average_has_the_bits_of_a_plain_sum(name, shares, num_values):
    vectors = _vectors(3, num_values)
    mean = np.zeros(num_values, np.float32)
    for vector, share in zip(vectors, shares, strict=True):
        mean = mean + np.float32(share / 3) * _decoded(name, _codes(name, vector), num_values)
    assert torch.equal(_average(name, vectors, shares, num_values), _codes(name, mean))


def test_what_is_not_clipped_makes_the_plain_mean():
    vectors = _vectors(4)
    plain = ((vectors[0] + vectors[1]) + vectors[2] + vectors[3]) / np.float32(4)
    assert _same_bits(_average("fp32", vectors, [1, 1, 1, 1]), plain)
    thirds = _decoded("fp32", _average("fp32", vectors[:3], [1, 1, 1]))
    np.testing.assert_allclose(thirds, vectors[:3].astype(np.float64).mean(0), rtol=0, atol=3e-7)


def test_one_contribution_is_its_own_average():
    for seed in range(20):  # among them, blocks that a second coding would change
        vectors = _vectors(2, seed=seed)
        assert torch.equal(_average("int8", vectors[:1], [1.0]), _codes("int8", vectors[0]))


def test_codes_of_another_length_are_not_averaged():
    codes = _codes("int8", _vectors(1)[0])
    given, out = [WeightedCodes(codes), WeightedCodes(codes[:-1])], torch.zeros_like(codes)
    with pytest.raises(ValueError, match="bytes"):
        average_codes(given, get_codec("int8"), C, out)
    assert not out.any()


# --- digests, and other machines ------------------------------------------------------------------


def test_digest_is_of_little_endian_bytes():
    state = _state()
    written = state.phi_C.numpy().tobytes() + state.v_C.numpy().tobytes()
    written += b"".join(number.to_bytes(8, "little", signed=True) for number in (-1, 7, 120))
    assert state_digest([state], -1, 7, 120) == blake3.blake3(written).digest(length=16)


@pytest.mark.parametrize("changed", ["phi", "v", "cycle", "steps", "weight"])
def test_digest_sees_every_change(changed):
    state, numbers = _state(), [3, 4, 5]
    before = state_digest([state], *numbers)
    if changed in ("phi", "v"):
        values = (state.phi_C if changed == "phi" else state.v_C).numpy()
        values[17] = np.nextafter(values[17], np.float32(9))
    else:
        numbers[["cycle", "steps", "weight"].index(changed)] += 1
    assert state_digest([state], *numbers) != before


_ELSEWHERE = """
import json, sys
import numpy as np, torch
from peer.averaging.diloco.nesterov import *
from peer.codec import get_codec

random, found = np.random.default_rng(0), {}
for name in ("fp32", "int8"):
    codec, size = get_codec(name), 128 * 129
    state = ChunkValues(*torch.from_numpy(random.standard_normal((2, size), dtype=np.float32)))
    codes = torch.empty(5, codec.code_bytes(size), dtype=torch.uint8)
    for cycle in range(5):
        for row in codes[1:]:
            values = random.standard_normal(size, dtype=np.float32) * np.float32(0.1)
            codec.encode(torch.from_numpy(values), row)
        given = [WeightedCodes(row, 4 * w / 57) for row, w in zip(codes[1:], (30, 17, 1, 9))]
        average_codes(given, codec, size, codes[0])
        step_pieces([(state, state)], codes[0], codec, NesterovFactors(0.4, 0.9))
    found[name] = state_digest([state], cycle, 5, 57).hex()
print(json.dumps([torch.backends.cpu.get_cpu_capability(), found]))
"""
GOLDEN = {"fp32": "5678d711c55b770318c7f32d43cdd708", "int8": "f5ed5e24095e36f9b4a8a54a92568897"}
_FLAG_OF = {"avx2": "avx2", "avx512": "avx512f"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_instruction_sets_make_no_difference(capability):
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if capability != "default" and f" {_FLAG_OF[capability]} " not in flags:
        pytest.skip(f"this processor has no {capability}")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE], env=environment, check=True, capture_output=True
    )
    used, found = json.loads(done.stdout)
    assert used == capability.upper()
    assert found == GOLDEN
