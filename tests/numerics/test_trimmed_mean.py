"""The trimmed mean against its definition, and what one or a few that lie can move."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from peer.averaging.diloco.nesterov import (
    LEAST_TRIMMED,
    WeightedCodes,
    average_codes,
    num_trimmed,
    trimmed_mean,
)
from peer.codec import TILE, get_codec

C = 384


def vectors(count: int, num_values: int = C) -> npt.NDArray[Any]:
    return np.random.default_rng(1).standard_normal((count, num_values), dtype=np.float32)


def trimmed(values_NC: npt.NDArray[Any]) -> npt.NDArray[Any]:
    out_C = torch.empty(values_NC.shape[1])
    trimmed_mean(torch.from_numpy(values_NC.copy()), out_C)
    return out_C.numpy()


def averaged(values_NC: npt.NDArray[Any], shares: list[float], *, trims: bool) -> Any:
    codec, num_values = get_codec("fp32"), values_NC.shape[1]
    given = []
    for row, share in zip(values_NC, shares, strict=True):
        codes = torch.empty(codec.code_bytes(num_values), dtype=torch.uint8)
        codec.encode(torch.from_numpy(row.copy()), codes)
        given.append(WeightedCodes(codes, share))
    out, values = torch.empty_like(given[0].codes), torch.empty(num_values)
    average_codes(given, codec, num_values, out, trims=trims)
    codec.decode(out, values)
    return values.numpy()


@pytest.mark.parametrize("num", [5, 8, 16])
def test_it_is_the_mean_of_the_middle(num):
    values_NC, left_out = vectors(num), num_trimmed(num)
    expected_C = np.sort(values_NC, axis=0)[left_out : num - left_out].mean(axis=0)
    np.testing.assert_allclose(trimmed(values_NC), expected_C, rtol=0, atol=1e-6)


def test_a_few_that_agree_move_no_coordinate_beyond_the_others():
    honest_NC = vectors(8)
    lying_NC = np.full((3, C), 100.0, np.float32)
    mean_C = trimmed(np.concatenate([honest_NC, lying_NC]))
    assert (mean_C <= honest_NC.max(axis=0)).all()
    assert (mean_C >= honest_NC.min(axis=0)).all()


@pytest.mark.parametrize("num", range(1, LEAST_TRIMMED))
def test_of_few_none_is_left_out(num):
    values_NC, shares = vectors(num), [0.5] * num
    assert num_trimmed(num) == 0
    plain_C = averaged(values_NC, shares, trims=False)
    assert averaged(values_NC, shares, trims=True).tobytes() == plain_C.tobytes()


def test_contributions_are_clipped_first():
    values_NC, shares = vectors(6), [1.0] * 5 + [0.0]
    cut_NC = values_NC * np.array(shares, np.float32)[:, None]
    expected_C = trimmed(cut_NC)
    assert averaged(values_NC, shares, trims=True).tobytes() == expected_C.tobytes()


@pytest.mark.slow
def test_tiles_and_parts_are_worked_out_to_the_same_bits():
    values_NC = vectors(7, TILE + 256)
    whole_C = averaged(values_NC, [1.0] * 7, trims=True)
    part_C = averaged(values_NC[:, TILE - 128 : TILE + 128], [1.0] * 7, trims=True)
    assert whole_C[TILE - 128 : TILE + 128].tobytes() == part_C.tobytes()
