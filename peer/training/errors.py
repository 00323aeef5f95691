"""Why a trainer ends of itself."""


class NonFinite(Exception):
    """A loss, a gradient or a weight is NaN or infinite; the message says which and where."""


class WrongCommand(Exception):
    """A command that does not fit the trainer's state; the message says why."""
