"""A codec is one row and one module: one that is made up here works wherever its name stands."""

from dataclasses import replace
from typing import ClassVar, Final

import pytest
import torch
from swarm_worlds import outcomes, simulated, start, toy_spec

from peer.cli.new import of_codecs
from peer.codec import get_codec
from peer.codec.codecs import PlainCodec
from protocol.errors import InvalidRunSpec
from protocol.run import ways as codecs
from protocol.run.run_spec import parse_bytes, parse_toml
from protocol.run.ways import CodecRow
from simulation.swarm import open_swarm

ROW: Final = CodecRow(made_by=f"{__name__}:HalfCodec", block_bytes=256)


class HalfCodec(PlainCodec):
    """Each value as an IEEE half."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> CodecRow:
    monkeypatch.setitem(codecs.CODECS, "fp16", ROW)
    return ROW


def test_it_is_made_by_its_name() -> None:
    assert isinstance(get_codec("fp16"), HalfCodec)


def test_a_run_spec_may_name_it() -> None:
    spec = parse_toml('[sync]\ncodec = "fp16"\n')
    assert spec.sync.codec == "fp16"
    assert parse_bytes(spec.to_bytes()) == spec


def test_a_wrong_name_is_told_of_it() -> None:
    with pytest.raises(InvalidRunSpec, match="sync.codec: unknown: use one of .*fp16"):
        parse_toml('[sync]\ncodec = "fp8"\n')


def test_a_new_run_spec_explains_it() -> None:
    assert "'fp16' 2" in of_codecs()


def test_if_it_is_for_differences_other_ways_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codecs.CODECS, "fp16", replace(ROW, differences_only=True))
    toml = '[sync]\ncodec = "fp16"\nmethod = '
    assert parse_toml(toml + '"diloco"').sync.codec == "fp16"
    with pytest.raises(InvalidRunSpec, match="too coarse for whole weights"):
        parse_toml(toml + '"noloco"')
    assert "also 'int4' 0.5, 'fp16' 2" in of_codecs()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_peers_average_with_it(tmp_path, method):
    @simulated()
    async def run() -> None:
        spec = toy_spec(3, codec="fp16", method=method)
        async with open_swarm(1, spec, tmp_path) as swarm:
            await start(swarm, "a", "b")
            await swarm.finished()
            for name in ("a", "b"):
                assert swarm[name].facts.averaged
                assert swarm[name].facts.codec == "fp16"
                assert not swarm[name].failure
            assert method == "diloco" or "averaged" in outcomes(swarm["a"])

    run()
