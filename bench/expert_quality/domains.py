"""Texts of the domains, of which no held-out piece is trained by anybody.

Files are taken in the order of the hashes of their names, the first FILE_BYTES of each. One in
HELD_OUT_OF is held out; of a new domain, that nobody trains, all are. What is left is cut into
pieces at empty lines: a piece that is held out in any domain is in no training text, and none is
there twice (licences, generated tables). All domains have equally much to train on.
"""

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from peer.training.corpus.blocks import Corpus

HELD_OUT_OF: Final = 8
FILE_BYTES: Final = 1 << 13
"""So that no domain is a few large files."""
PIECE_END: Final = b"\n\n"
MIX: Final = "mix"


@dataclass(frozen=True, slots=True)
class Domain:
    """A kind of text.

    Attributes:
        root: `stdlib` or `purelib` of this Python, or a folder.
        pattern: of file names below it.
        is_trained: False is a domain that nobody trains.
    """

    name: str
    root: str
    pattern: str
    is_trained: bool = True

    def files(self) -> list[Path]:
        """In an order that names alone decide."""
        root = self._folder()
        found = [path for path in root.rglob(self.pattern) if path.is_file() and self._owns(path)]
        return sorted(found, key=lambda path: _order(path.relative_to(root)))

    def _folder(self) -> Path:
        is_named = self.root in sysconfig.get_path_names()
        return Path(sysconfig.get_path(self.root) if is_named else self.root)

    def _owns(self, path: Path) -> bool:
        """Installed packages are no part of the standard library."""
        return self.root != "stdlib" or "site-packages" not in path.parts

    def is_held_out(self, path: Path) -> bool:
        return not self.is_trained or _order(path.relative_to(self._folder()))[0] % HELD_OUT_OF == 0


DOMAINS: Final = (
    Domain("python", "stdlib", "*.py"),
    Domain("headers", "purelib", "torch/include/**/*.h"),
    Domain("docs", "purelib", "*.dist-info/METADATA"),
    Domain("debian", "/usr/share/doc", "*.txt", is_trained=False),
    Domain("json", "purelib", "*.json", is_trained=False),
)


@dataclass(frozen=True, slots=True)
class Texts:
    """Training and held-out text of each domain, by name; new domains have nothing to train on."""

    train: Mapping[str, bytes]
    held_out: Mapping[str, bytes]

    @classmethod
    def gather(cls, domains: Sequence[Domain], most_bytes: int) -> Self:
        """Read them.

        Args:
            most_bytes: to train on of each domain; as much of each as there is of the smallest.
        """
        seen, most_held_out = set[bytes](), most_bytes // HELD_OUT_OF
        held_out = {d.name: _text(d, seen, most_held_out, held_out=True) for d in domains}
        trained = [domain for domain in domains if domain.is_trained]
        train = {d.name: _text(d, seen, most_bytes, held_out=False) for d in trained}
        length = min(map(len, train.values()))
        return cls({name: text[:length] for name, text in train.items()}, held_out)

    def digest(self) -> str:
        """Tell these texts from those of other versions of the packages."""
        parts = [*self.train.values(), *self.held_out.values()]
        return hashlib.sha256(b"".join(map(_whole, parts))).hexdigest()[:16]

    def corpus(self, domain: str, context_length: int) -> Corpus:
        """One domain's, in bytes. MIX is the text of all that are trained; it holds nothing out."""
        train = b"".join(self.train.values()) if domain == MIX else self.train.get(domain, b"")
        held_out = self.held_out.get(domain, b"")
        return Corpus(_tokens(train), _tokens(held_out), context_length)


def _whole(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _tokens(text: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text, np.uint8)


def _text(domain: Domain, seen: set[bytes], most_bytes: int, *, held_out: bool) -> bytes:
    found, total = list[bytes](), 0
    for piece in _pieces(domain, held_out=held_out):
        digest = hashlib.sha256(b" ".join(piece.split())).digest()
        if digest in seen:
            continue
        seen.add(digest)
        found.append(piece)
        total += len(piece) + len(PIECE_END)
        if total >= most_bytes:
            break
    return PIECE_END.join(found)[:most_bytes]


def _pieces(domain: Domain, *, held_out: bool) -> Iterator[bytes]:
    for path in domain.files():
        if domain.is_held_out(path) == held_out:
            with path.open("rb") as file:
                yield from filter(None, file.read(FILE_BYTES).split(PIECE_END))


def _order(name: Path) -> bytes:
    return hashlib.sha256(name.as_posix().encode()).digest()
