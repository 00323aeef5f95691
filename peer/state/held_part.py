"""The part of the model that a peer holds, and what belongs to it.

The run has spec, links, clock, data plan and admission, whichever part a peer holds. A group has
what is here, and the state: weights and momentum of the part, where they stand, and the rounds that
move them (peer/averaging). Of the run a group knows what any peer knows.
"""

from dataclasses import dataclass
from typing import Self

from protocol.errors import InvalidRunSpec
from protocol.membership.group import Group
from protocol.membership.view import View
from protocol.run.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class PartShape:
    """What a part of a model looks like, as its layout says (protocol/run/layout.py)."""

    layout_digest: str
    padded_parameters: int

    @classmethod
    def of_whole_model(cls, spec: RunSpec) -> Self:
        """The shape that the founder has frozen. Raises InvalidRunSpec when nobody has."""
        frozen = spec.frozen
        if frozen is None:
            raise InvalidRunSpec("the run spec does not say what its model looks like")
        return cls(frozen.layout_digest, frozen.padded_parameters)


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What belongs to the group that a peer is in.

    Attributes:
        shape: of the part's flat vector.
        codec: how the vector is coded.
        view: who else is in the group.
    """

    group: Group
    shape: PartShape
    codec: str
    view: View
