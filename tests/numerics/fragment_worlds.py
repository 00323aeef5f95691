"""Replicas of a small model of three fragments, in one process, without data or loop."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peer.codec import codes_as_tensor, get_codec
from peer.training.fragments import FragmentSnapshots
from peer.training.model import FlatModel
from peer.training.shared import CodeRegions
from protocol.fragment.fragments import Fragment, fragments_of_run
from protocol.run.sections import DilocoSection

SHAPES = {
    "embed": (2, 9000),
    **{f"layers.{layer}.weight": (9000,) for layer in range(4)},
    "norm": (100,),
}


@dataclass
class Replica:
    """theta and phi may be written by the test; spans are those of a fragment's chunk."""

    snapshots: FragmentSnapshots
    regions: CodeRegions
    theta: npt.NDArray[Any]
    phi: npt.NDArray[Any]
    gradient: npt.NDArray[Any]
    codec: str

    def values(
        self, vector: npt.NDArray[Any], fragment: int, chunk: int | None = None
    ) -> npt.NDArray[Any]:
        found = self.snapshots.fragments[fragment]
        spans = found.spans if chunk is None else found.chunk_spans(chunk)
        return np.concatenate([vector[start:stop] for start, stop in spans])

    def write(
        self, vector: npt.NDArray[Any], fragment: int, chunk: int, values: npt.NDArray[Any]
    ) -> None:
        begin = 0
        for start, stop in self.snapshots.fragments[fragment].chunk_spans(chunk):
            vector[start:stop] = values[begin : begin + stop - start]
            begin += stop - start

    def decoded(self, fragment: int) -> npt.NDArray[Any]:
        return decoded(
            self.snapshots.fragments[fragment], self.snapshots.codes(fragment), self.codec
        )


def decoded(fragment: Fragment, codes: memoryview, codec_name: str) -> npt.NDArray[Any]:
    """What the codes of a fragment stand for: chunk by chunk."""
    codec, begin, parts = get_codec(codec_name), 0, []
    for start, stop in fragment.chunks:
        end = begin + codec.code_bytes(stop - start)
        part = torch.empty(stop - start)
        codec.decode(codes_as_tensor(codes[begin:end]), part)
        parts.append(part.numpy())
        begin = end
    assert begin == len(codes)
    return np.concatenate(parts)


class _Named(torch.nn.Module):
    """A module whose parameters have the names of `SHAPES`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(4))
        for name, shape in SHAPES.items():
            owner, _, leaf = name.rpartition(".")
            self.get_submodule(owner).register_parameter(
                leaf, torch.nn.Parameter(torch.zeros(shape))
            )


def random_replica(seed: int = 0, codec_name: str = "int8", **diloco) -> Replica:
    """theta and phi at random, a tenth apart."""
    model = FlatModel(_Named(), torch.device("cpu"))
    section = DilocoSection(blocks_per_fragment=2, **diloco)
    fragments = fragments_of_run(section, model.layout)
    random = np.random.default_rng(seed)
    phi = random.normal(0, 1, model.theta_P.numel()).astype("f4")
    codec = get_codec(codec_name)
    sizes = [codec.code_bytes(fragment.size) for fragment in fragments]
    regions = CodeRegions(-1, sizes, writable=True)
    phi_P, merge_share = torch.from_numpy(phi), 1.0 - section.merge
    snapshots = FragmentSnapshots(model, phi_P, regions, codec, fragments, merge_share)
    theta = model.theta_P.numpy()
    theta[:] = phi + random.normal(0, 0.1, phi.size).astype("f4")
    return Replica(snapshots, regions, theta, phi, model.gradient_P.numpy(), codec_name)
