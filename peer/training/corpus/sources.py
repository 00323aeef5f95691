"""Where texts come from: the Python standard library, or a glob of files."""

import glob
import hashlib
import sysconfig
from pathlib import Path
from typing import Final

from .packed import InvalidCorpus, Text, check_name

STDLIB_BYTES: Final = 8_000_000
"""Bound of the `stdlib` corpus, so that a joiner has it within seconds over a home uplink."""
_LEFT_OUT: Final = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
    }
)
"""Folders that are no source text of the library, or tables rather than text."""


def stdlib_texts() -> list[Text]:
    """Source files of this Python's standard library, up to `STDLIB_BYTES` of them.

    Which ones is decided by the hash of their names, not by what the file system lists first.
    Another Python has other texts: the run is frozen by the founder's packed file, which joiners
    fetch.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if path.is_file() and not _LEFT_OUT & set(path.relative_to(root).parts)
    )
    texts = []
    total_bytes = 0
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        path = root / name
        total_bytes += path.stat().st_size
        if total_bytes > STDLIB_BYTES:
            break
        texts.append(Text(name, path))
    return texts


def glob_texts(pattern: str) -> list[Text]:
    """Files that match a glob, named by their path below the glob's fixed part.

    Raises:
        InvalidCorpus: none does, or one has a name that is not UTF-8.
    """
    expanded = str(Path(pattern).expanduser())
    # Path.glob takes no absolute pattern.
    found = glob.glob(expanded, recursive=True)  # noqa: PTH207
    paths = [Path(name) for name in found if Path(name).is_file()]
    if not paths:
        raise InvalidCorpus(f"no file matches text:{pattern}")
    root = _fixed_part(Path(expanded))
    return [Text(check_name(path.relative_to(root).as_posix()), path) for path in paths]


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first part with a wildcard."""
    fixed = pattern.parent
    while glob.has_magic(str(fixed)):
        fixed = fixed.parent
    return fixed
