"""Why a trainer ends of itself."""

from protocol.errors import LocoError


class CannotTrain(LocoError):
    """What the trainer was given cannot be used on this machine, and a new try changes nothing."""


class NonFinite(Exception):
    """A loss, a gradient or a weight is NaN or infinite; the message says which and where."""


class WrongCommand(Exception):
    """A command that does not fit the trainer's state; the message says why."""


class Interrupted(Exception):
    """The daemon wants the trainer to stop, in the middle of a step."""
