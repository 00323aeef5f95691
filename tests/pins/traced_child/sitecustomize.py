"""Traces a trainer's process. Python loads this file at the start, for its folder is on the path.

The environment says from the call of which function, to the return of which, and where to write
what was called in between, each time anew: see `traced_trainer` in test_trainer_walks.py.
"""

import json
import os
import sys
from pathlib import Path
from types import FrameType

sys.path.append(str(Path(__file__).parents[1]))

from traces import Trace, place_of


class TrainerTrace(Trace):
    """Starts and ends by the names of functions."""

    def __init__(self, first: str, last: str, path: Path) -> None:
        super().__init__()
        self._first, self._last, self._path = first, last, path
        self._begun = False

    def note(self, frame: FrameType, event: str, result: object) -> None:
        """A function is called, or returns."""
        name = frame.f_code.co_qualname
        if not self._begun and (event, name) == ("call", self._first):
            self._begun = place_of(frame.f_code.co_filename) is not None
            self.calls.clear()
            self.crossings.clear()
            self.types.clear()
        if self._begun:
            super().note(frame, event, result)
        if self._begun and (event, name) == ("return", self._last):
            self._begun = False
            self._path.write_text(json.dumps(self.walk))


if sys.argv[:1] == ["-m"] and "TRACED_FIRST" in os.environ:
    first, last, path = (os.environ[f"TRACED_{name}"] for name in ("FIRST", "LAST", "PATH"))
    sys.setprofile(TrainerTrace(first, last, Path(path)).note)
