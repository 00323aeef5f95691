"""Modes of files: keys and secrets are their owner's alone; all else is as the user's umask says.

Files that are written aside get a private mode from the system, so the usual one is put on them.
"""

import os
from typing import Final

PRIVATE_FILE: Final = 0o600


def _usual() -> int:
    umask = os.umask(0o077)  # the system tells it to those alone that set another
    os.umask(umask)
    return 0o666 & ~umask


USUAL_FILE: Final = _usual()
"""What `open` gives; asked for once, at the first import, before there are threads."""
