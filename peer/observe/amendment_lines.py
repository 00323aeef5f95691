"""What `loco-peer status` and `amend --show` say of a run's amendments."""

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.run.amendments import AmendedSpec


def amendments_json(spec: AmendedSpec | None) -> tuple[dict[str, Any], ...]:
    """Plain values, in the order of their versions; none while the run is not known."""
    if spec is None:
        return ()
    steps = spec.founding.sync.round_steps
    return tuple(
        {
            "version": amendment.version,
            "round": amendment.from_round,
            "step": amendment.from_round * steps,
            "changes": dict(amendment.changes),
        }
        for amendment in spec.amendments
    )


def amendment_lines(amendments: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each; see `amendments_json`."""
    return [
        f"{each['version']}, from round {each['round']:,} (step {each['step']:,}) on: "
        + ", ".join(f"{key} = {value}" for key, value in each["changes"].items())
        for each in amendments
    ]
