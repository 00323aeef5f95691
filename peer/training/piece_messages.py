"""What daemon and trainer say to each other about pieces of the corpus that are not here yet.

daemon                              trainer
                                    PiecesMissing(pieces)     training stands still
PiecesHere                          it goes on
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PiecesHere:
    """All pieces of the corpus that the trainer said it misses are here."""


@dataclass(frozen=True, slots=True)
class PiecesMissing:
    """These pieces of the corpus are needed for the next step, and are not here.

    Nothing is trained before `PiecesHere`; other commands are obeyed meanwhile.
    """

    pieces: tuple[int, ...]
