"""Importing what is large.

Imports make objects that stay. The collector looks through all of them again and again while their
number grows, for a quarter of the time that torch and transformers take; and each time afterwards
that it looks through everything, which holds up the whole process.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Collect no garbage in this block; what is there at its end is never looked through again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
