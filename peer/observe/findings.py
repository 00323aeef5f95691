"""What `loco-peer doctor` found: one line for each thing that was looked at, and what to do."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    """How a thing stands."""

    WELL = "ok"
    NOTE = "note"
    """Works, with something to know."""
    ILL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        cure: what to do about it; empty where there is nothing to do.
    """

    subject: str
    health: Health
    says: str
    cure: str = ""


def lines_of(findings: Iterable[Finding]) -> Iterator[str]:
    """The findings as people read them."""
    for finding in findings:
        yield f"{finding.health:4}  {finding.subject:<10}  {finding.says}"
        if finding.cure:
            yield f"{'':16}  -> {finding.cure}"


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.health is not Health.ILL for finding in findings)
