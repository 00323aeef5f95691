"""The errors of loco-peer, by blame.

    LocoError
     |-- LocalProtocolError     we broke the protocol: a bug here
     |-- RemoteProtocolError    they did: scored, throttled, ignored
     |-- Refused                they declined, with a reason and a sentence for people
     |-- InvalidRunSpec         the run spec cannot be used; says what to change
     `-- StreamLost             the stream ended or broke before the conversation did

Network implementations raise `StreamLost` for every way in which a stream can end early, closed by
another task of ours among them: who sends what may be lost need suppress nothing but a `LocoError`.
"""

from .outcomes import RefusalReason


class LocoError(Exception):
    """Base of every error that loco-peer raises on purpose."""


class LocalProtocolError(LocoError):
    """We tried something that the protocol does not allow."""


class RemoteProtocolError(LocoError):
    """The other side sent something that the protocol does not allow."""


class StreamLost(LocoError):
    """The stream ended, was reset or was cut off before the conversation was over."""


class InvalidRunSpec(LocoError):
    """The run spec cannot be used; the message says what to change."""


class Refused(LocoError):
    """The other side declined.

    Attributes:
        reason: one of the closed list.
        sentence: what a person should read.
    """

    def __init__(self, reason: RefusalReason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


class Declined(Refused):
    """We declined the other side; attributes as there."""


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions inside nested groups, in order; an exception that is none is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]
