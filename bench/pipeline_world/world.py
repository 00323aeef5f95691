"""Nine machines, the links between them, and the planner's problem that they are."""

import math
from dataclasses import dataclass
from typing import Final

import tomlkit

from bench.link_table import Link, LinkTable
from peer.codec import get_codec
from peer.training.shared import SLOTS, boundary_shape
from protocol.pipeline.problem import (
    THOUSAND,
    US_PER_S,
    PathRules,
    PipelinePeer,
    Problem,
    StageWork,
)
from protocol.pipeline.tables import SAME_PLACE, RegionLink, line_between
from protocol.run.run_spec import parse_toml

PLACES: Final = (
    "Iowa", "Oregon", "LA", "London", "Germany", "NL", "Japan", "Singapore", "Taiwan"
)  # fmt: skip
"""Three machines each in three parts of the world."""
STAGE_SIZES: Final = (3, 2, 2, 2)
VISITED: Final = 3
MICROBATCHES: Final = 24
"""Two waves of every data peer's slots."""
CONTEXT: Final = 512
HIDDEN: Final = 512
BACKWARD_PERMILLE: Final = 1500
LOSS_PERMILLE: Final = 250
NEVER: Final = 10**6
GOODPUT: Final = 0.955
"""Bytes of boundaries for one byte of a link: headers of TCP/IP (3.5%), TLS and yamux."""


@dataclass(frozen=True, slots=True)
class World:
    """Machines at `PLACES`.

    Attributes:
        forward_us: stated, of one stage and microbatch.
        sequences: of a microbatch.
        codec: of boundaries.
        thinner: a link has the bandwidth between its regions divided by this.
        bits_per_s: of every link, in place of that.
    """

    name: str
    forward_us: int
    sequences: int
    codec: str = "bf16"
    thinner: int = 1
    bits_per_s: int | None = None

    def line(self, one: str, other: str) -> RegionLink:
        """The link between two places."""
        line = line_between(one, other) or SAME_PLACE
        if self.bits_per_s is not None:
            return RegionLink(line.latency_us, self.bits_per_s // 8)
        return RegionLink(line.latency_us, line.bytes_per_s // self.thinner)

    def links(self) -> LinkTable:
        """The links, for the router; hosts are numbered as the machines."""
        numbered = list(enumerate(PLACES))
        lines = {(a, b): self.line(p, q) for a, p in numbered for b, q in numbered if a != b}
        links = {
            way: Link(line.latency_us / US_PER_S, 8.0 * line.bytes_per_s)
            for way, line in lines.items()
        }
        return LinkTable(links, [None] * len(PLACES))

    def problem(self) -> Problem:
        """The whole, for the planner."""
        table = [[self.line(a, b) for b in PLACES] for a in PLACES]
        spec = parse_toml(self.run_toml(VISITED, 1))
        boundary_bytes = get_codec(spec.pipeline.codec).code_bytes(math.prod(boundary_shape(spec)))
        return Problem(
            tuple(
                PipelinePeer(f"{place}-{n}", self.forward_us, SLOTS)
                for n, place in enumerate(PLACES)
            ),
            tuple(tuple(line.latency_us for line in row) for row in table),
            tuple(tuple(round(GOODPUT * line.bytes_per_s) for line in row) for row in table),
            StageWork(
                boundary_bytes,
                backward_permille=BACKWARD_PERMILLE,
                loss_permille=LOSS_PERMILLE,
            ),
            STAGE_SIZES,
            VISITED,
            MICROBATCHES,
            PathRules(),
            queued_links=True,
        )

    def run_toml(self, visited: int, share: int) -> str:
        """The run spec of a way whose data peers send `share` microbatches each; it never ends."""
        stages = len(STAGE_SIZES)
        tree = {
            "name": f"pipeline-{self.name}",
            "model": {
                "hidden_size": HIDDEN,
                "intermediate_size": 128,
                "num_layers": stages,
                "num_heads": 8,
                "context_length": CONTEXT,
            },
            "data": {"validation_blocks": self.sequences},
            "training": {
                "total_steps": NEVER * 10,
                "batch_size": self.sequences * share,
                "micro_batch": self.sequences,
                "precision": "fp32",
            },
            "sync": {"inner_steps": NEVER},
            "pipeline": {"stages": stages, "visited": visited, "codec": self.codec},
        }
        return tomlkit.dumps(tree)

    def stated_s(self) -> dict[str, float]:
        """The time that each kind of work takes."""
        forward_s = self.forward_us / US_PER_S
        return {
            "forward": forward_s,
            "loss": forward_s * LOSS_PERMILLE / THOUSAND,
            "backward": forward_s * BACKWARD_PERMILLE / THOUSAND,
        }
