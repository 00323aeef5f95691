"""A group: the run and a part of its model.

Peers that hold the same part of the model average it with each other, and with nobody else: the
whole model, a stage of a pipeline, an expert, or a fragment that has partners of its own. A group
has its layout, code, view and state. The run has spec, links, clock, data plan and admission.

Nobody lists the groups of a run or hands out their names. A part is named by a word of a closed
list, and by its number where there are several:

    model                  the whole
    stage/2                the third stage of a pipeline
    expert/5, fragment/3   likewise

Rules
  1. A part has one spelling (no leading zeros): two would be two groups that never meet.
  2. The digest of a group covers run id and part. It stands in every message that concerns the
     group's weights or progress, in the keys of its records in the directory, and in every hash by
     which its members choose among themselves (partners, owners): what is drawn for one group says
     nothing of another.
  3. What is meant for another group is refused as `other_group`. Links are the run's, so peers of
     different groups know each other, and one that is misled or hostile may try.

Invariant: groups are equal exactly when their digests are (blake3 over an encoding that can be read
in one way only: neither run id nor part holds a zero byte).
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import blake3

from protocol.errors import LocalProtocolError

WHOLE_MODEL: Final = "model"
KINDS: Final = ("stage", "expert", "fragment")

_DOMAIN: Final = b"loco/v1/group\0"
_PART: Final = re.compile(rf"{WHOLE_MODEL}|(?:{'|'.join(KINDS)})/(?:0|[1-9][0-9]{{0,4}})")
_RUN_ID: Final = re.compile(r"[0-9a-f]{32,64}")


@dataclass(frozen=True, slots=True)
class Group:
    """The peers of a run that hold the same part of its model.

    Raises LocalProtocolError unless both are well formed.
    """

    run_id: str
    part: str = WHOLE_MODEL

    def __post_init__(self) -> None:
        if _RUN_ID.fullmatch(self.run_id) is None:
            raise LocalProtocolError(f"{self.run_id!r} is no run id")
        if _PART.fullmatch(self.part) is None:
            kinds = ", ".join(f"'{kind}/N'" for kind in KINDS)
            raise LocalProtocolError(
                f"{self.part!r} is no part of a model: use '{WHOLE_MODEL}', or one of {kinds}"
            )

    @property
    def digest(self) -> str:
        """The name of the group to others: 32 hex digits."""
        return _digest(self.run_id, self.part)


def other_group_sentence(ours: str, meant: str) -> str:
    """The sentence of a refusal; both are digests."""
    return (
        f"I am in group {ours}, this is for group {meant}:"
        " another part of the model, or of another run"
    )


@lru_cache(maxsize=64)
def _digest(run_id: str, part: str) -> str:
    named = b"\0".join((run_id.encode(), part.encode()))
    return blake3.blake3(_DOMAIN + named).hexdigest(length=16)
