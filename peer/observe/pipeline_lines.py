"""What `loco-peer status` says of a pipeline, line by line."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from protocol.names import short_id

US_PER_MS: Final = 1000
SHOWN_LINKS: Final = 8
SHOWN_PATHS: Final = 8


def pipeline_lines(pipeline: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values; none where nothing is known yet.

    Args:
        pipeline: as `PipelineFacts.to_json` writes it.
    """
    lines = (
        ("iteration", _iteration(pipeline)),
        ("time in", _spent(pipeline.get("spent_s", {}))),
        ("paths", _paths(pipeline.get("paths", ()))),
        ("links", _links(pipeline.get("links", ()))),
        ("replicas", _apart(pipeline.get("replicas_apart"))),
    )
    return [(name, value) for name, value in lines if value]


def _apart(share: float | None) -> str:
    return "" if share is None else f"{share:.2%} apart at the last average in this stage"


def _iteration(pipeline: Mapping[str, Any]) -> str:
    planned, measured = pipeline.get("planned_s"), pipeline.get("iteration_s")
    said = [] if measured is None else [f"{measured:.2f} s"]
    if planned:
        said.append(f"planned {planned:.2f} s (plan {pipeline['plan'][:8]})")
    return ", ".join(said)


def _spent(spent_s: Mapping[str, float]) -> str:
    total_s = sum(spent_s.values())
    return ", ".join(f"{what} {s / total_s:.0%}" for what, s in spent_s.items()) if total_s else ""


def _paths(paths: tuple[str, ...]) -> str:
    said = [f"{path} ({times}x)" for path, times in Counter(paths).most_common(SHOWN_PATHS)]
    return "; ".join(said)


def _links(links: tuple[Mapping[str, Any], ...]) -> str:
    """Those that boundaries have taken, the slowest first."""
    used = [link for link in links if link["out_us"]]
    slowest = sorted(used, key=lambda link: -link["rtt_us"] - link["out_us"])[:SHOWN_LINKS]
    return "; ".join(
        f"{short_id(link['peer_id'])} {link['rtt_us'] / US_PER_MS:.1f} + "
        f"{link['out_us'] / US_PER_MS:.1f} ms"
        for link in slowest
    )
