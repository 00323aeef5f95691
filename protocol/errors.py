"""The errors of loco-peer, by blame.

Network implementations raise `StreamLost` for every way in which a stream can end early, also when
another task of ours closes it: a sender of what may be lost suppresses nothing but a `LocoError`.
"""

from .outcomes import RefusalReason


class LocoError(Exception):
    """Base of every error that loco-peer raises on purpose."""


class LocalProtocolError(LocoError):
    """We tried something that the protocol does not allow: a bug here."""


class RemoteProtocolError(LocoError):
    """The other side sent something that the protocol does not allow; it is held against it."""


class StreamLost(LocoError):
    """The stream ended, was reset or was cut off before the conversation was over."""


class Unusable(LocoError):
    """Input, or a part of this machine, cannot be used; the message says what to change."""


class InvalidRunSpec(Unusable):
    """The run spec cannot be used; the message says what to change."""


class Refused(LocoError):
    """The other side declined; the sentence is for people."""

    def __init__(self, reason: RefusalReason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


class Declined(Refused):
    """We declined the other side."""


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions inside nested groups, in order; any other exception is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]
