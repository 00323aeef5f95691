"""The packed corpus file: a header and all tokens, in one file that can be mapped.

    8 bytes     magic
    4 bytes     length of the header, big-endian
    ...         header: msgpack, see `PackedHeader`
    ...         zeros up to a multiple of 64
    ...         training tokens, then validation tokens, little-endian uint8, uint16 or uint32

The same texts and tokenizer give the same bytes: files are in sorted order, and nothing in the file
depends on time, machine or path.

The tail of a corpus of one text is held out. The text is read in parts, so that it may be larger
than the memory. Parts end at the end of a line where lines are not too long, and the tail begins
with one.
"""

import codecs
import hashlib
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import EIO
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from peer.runtime.files import replacing
from protocol.errors import LocoError
from protocol.schedule.progress import Counting, Tell

from .tokenizer import Tokenizer

# --- a corpus of one text -------------------------------------------------------------------------

HELD_OUT_OF: Final = 20
"""One text in this many is held out for validation; of one text alone the last of as many parts."""
PART_BYTES: Final = 1 << 20
"""Bytes that are read or tokenised at once, and in which an end of the line is then looked for."""
_CONTINUES: Final = range(0x80, 0xC0)
"""Bytes of UTF-8 that go on with a character."""


def tail_start(path: Path) -> int:
    """The byte offset of the held-out tail. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        wanted = file.seek(size - size // HELD_OUT_OF)
        line = file.readline(PART_BYTES)
        if line.endswith(b"\n") and file.tell() < size:
            return file.tell()
        file.seek(wanted)  # no line ends there
        return wanted + sum(1 for _ in _leading(file.read(4)))


def read_parts(path: Path, start: int, end: int) -> Iterator[str]:
    """The text from byte `start` to byte `end`, in parts. Raises UnicodeDecodeError, OSError."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    with path.open("rb") as file:
        file.seek(start)
        while (left := end - file.tell()) > 0:
            data = file.read(min(left, PART_BYTES))
            data += file.readline(min(left - len(data), PART_BYTES))
            if not data:
                raise OSError(EIO, "it became shorter while it was read", str(path))
            yield decode(data, final=file.tell() >= end)


def _leading(data: bytes) -> Iterator[int]:
    """The bytes at the beginning that belong to the character before."""
    for byte in data:
        if byte not in _CONTINUES:
            return
        yield byte


MAGIC: Final = b"LOCOCRP1"
_LENGTH: Final = struct.Struct(">I")
_ALIGNMENT: Final = 64


class InvalidCorpus(LocoError):
    """The corpus cannot be used; the message says what to change."""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class PackedHeader(msgspec.Struct, frozen=True):
    """The header of a packed file; older files also list their texts."""

    tokenizer_digest: str
    vocabulary_size: _Count
    dtype: Annotated[str, msgspec.Meta(pattern=r"^(\|u1|<u2|<u4)$")]
    train_tokens: _Count
    validation_tokens: _Count


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a corpus, by the name that all peers know it by."""

    name: str
    path: Path


def check_name(name: str) -> str:
    """The name itself. Raises InvalidCorpus where it is no UTF-8.

    The choice of held-out texts follows from names, so they must be the same on every machine.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidCorpus(f"the name {name!a} is not UTF-8: rename that file") from error
    return name


def held_out_names(names: Sequence[str]) -> frozenset[str]:
    """The files for validation: by hash of the name, and at least one when there are two."""

    def is_held_out(name: str) -> bool:
        digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"loco-held-out").digest()
        return int.from_bytes(digest, "big") % HELD_OUT_OF == 0

    chosen = frozenset(filter(is_held_out, names))
    if chosen and len(chosen) < len(names):
        return chosen
    return frozenset(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:1])


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The narrowest little-endian type that holds every token."""
    for dtype in ("<u1", "<u2"):
        if vocabulary_size <= np.iinfo(dtype).max + 1:
            return np.dtype(dtype)
    return np.dtype("<u4")


def pack(texts: Iterable[Text], tokenizer: Tokenizer, out_path: Path, tell: Tell) -> None:
    """Tokenise the texts and write the packed file, whole or not at all.

    Texts that are not UTF-8 are left out. Raises InvalidCorpus where none is left.
    """
    ordered = sorted(texts, key=lambda text: text.name)
    reading = Counting(tell, "reading", _bytes_of(ordered))
    whys = {text.name: why for text in ordered if (why := _unreadable(text.path, reading))}
    readable = [text for text in ordered if text.name not in whys]
    if not readable:
        raise _none_of(whys)
    held_out = held_out_names([text.name for text in ordered])
    if len({text.name in held_out for text in readable}) == 1:
        held_out = held_out_names([text.name for text in readable])
    dtype = token_dtype(tokenizer.vocabulary_size)
    separator = np.array(tokenizer.separator, dtype=dtype).tobytes()
    tokenising = Counting(tell, "tokenising", _bytes_of(readable))
    with (
        tempfile.TemporaryFile(dir=out_path.parent) as train,
        tempfile.TemporaryFile(dir=out_path.parent) as validation,
    ):

        def add(parts: Iterable[str], out: IO[bytes]) -> None:
            for part in parts:
                tokenising.add(len(part.encode()))
                out.write(tokenizer.encode(part).astype(dtype).tobytes())
            out.write(separator)

        if len(readable) == 1:
            (path,) = (text.path for text in readable)
            middle, end = tail_start(path), path.stat().st_size
            add(read_parts(path, 0, middle), train)
            add(read_parts(path, middle, end), validation)
        else:
            for text in readable:
                out = validation if text.name in held_out else train
                add([text.path.read_bytes().decode()], out)
        sizes_bytes = train.tell(), validation.tell()
        write_packed(out_path, tokenizer, sizes_bytes, (train, validation), tell)


def _bytes_of(texts: Iterable[Text]) -> int:
    return sum(text.path.stat().st_size for text in texts)


def _unreadable(path: Path, reading: Counting) -> str | None:
    """Why a text is not UTF-8; None where it is. Raises OSError."""
    try:
        for part in read_parts(path, 0, path.stat().st_size):
            reading.add(len(part.encode()))
    except UnicodeDecodeError as error:
        return f"byte {error.object[error.start]:#04x} is not UTF-8"
    return None


def _none_of(whys: Mapping[str, str]) -> InvalidCorpus:
    names = [f"{name} ({why})" for name, why in whys.items()]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return InvalidCorpus(
        f"no text can be read: {', '.join(names[:3])}{more}. text: takes plain text in UTF-8;"
        " convert it (iconv -f LATIN1 -t UTF-8), or name what it is: jsonl:, parquet: or tokens:"
    )


def write_packed(
    out_path: Path,
    tokenizer: Tokenizer,
    sizes_bytes: tuple[int, int],
    parts: Iterable[IO[bytes]],
    tell: Tell,
    dtype: np.dtype[Any] | None = None,
) -> None:
    """Write a packed file of these files of tokens, whole or not at all.

    Args:
        sizes_bytes: of the parts to train on, which come first, and of the held-out ones.
    """
    dtype = dtype or token_dtype(tokenizer.vocabulary_size)
    train, held_out = (size // dtype.itemsize for size in sizes_bytes)
    header = msgspec.msgpack.encode(
        PackedHeader(tokenizer.digest, tokenizer.vocabulary_size, dtype.str, train, held_out)
    )
    writing = Counting(tell, "writing", sum(sizes_bytes))
    with replacing(out_path) as out:
        out.write(MAGIC + _LENGTH.pack(len(header)) + header)
        out.write(bytes(-out.tell() % _ALIGNMENT))
        for part in parts:
            part.seek(0)
            while chunk := part.read(PART_BYTES):
                writing.add(len(chunk))
                out.write(chunk)


def read_header(path: Path) -> tuple[PackedHeader, int]:
    """The header of a packed file, and the byte offset of its first token. Raises InvalidCorpus."""
    with path.open("rb") as file:
        prefix = file.read(len(MAGIC) + _LENGTH.size)
        if not prefix.startswith(MAGIC) or len(prefix) < len(MAGIC) + _LENGTH.size:
            raise InvalidCorpus(f"{path} is not a packed corpus")
        (length,) = _LENGTH.unpack_from(prefix, len(MAGIC))
        if length > path.stat().st_size:
            raise InvalidCorpus(f"{path} announces a header of {length} bytes")
        try:
            header = msgspec.msgpack.decode(file.read(length), type=PackedHeader)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise InvalidCorpus(f"{path} has no readable header: {error}") from error
        offset = file.tell() + -file.tell() % _ALIGNMENT
    tokens = header.train_tokens + header.validation_tokens
    if path.stat().st_size != offset + tokens * np.dtype(header.dtype).itemsize:
        raise InvalidCorpus(f"{path} is not as long as its header says")
    return header, offset


# --- token files made elsewhere: .npy, or .bin of little-endian uint16 (.u32 for uint32) ----------

RAW_SUFFIXES: Final = (".npy", ".bin", ".u32")

Tokens = npt.NDArray[Any]


def map_tokens(path: Path) -> Tokens:
    """Raises InvalidCorpus."""
    try:
        if path.suffix != ".npy":
            return np.memmap(path, dtype="<u4" if path.suffix == ".u32" else "<u2", mode="r")
        tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidCorpus(f"cannot read tokens from {path}: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise InvalidCorpus(f"{path} holds {tokens.dtype} {tokens.shape}, not a row of integers")
    return tokens


def largest_token(path: Path, tell: Tell) -> int:
    """Raises InvalidCorpus where one is negative."""
    tokens = map_tokens(path)
    reading = Counting(tell, "reading", tokens.nbytes)
    largest, at_once = 0, PART_BYTES // tokens.itemsize
    for start in range(0, len(tokens), at_once):
        chunk = tokens[start : start + at_once]
        reading.add(chunk.nbytes)
        if chunk.dtype.kind == "i" and chunk.min() < 0:
            raise InvalidCorpus(f"{path} holds negative tokens")
        largest = max(largest, int(chunk.max()))
    return largest
