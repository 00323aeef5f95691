"""Documents of a data set, shard by shard.

A source names a data set and the column that holds the text:

    jsonl:GLOB[#COLUMN]                     files of one JSON object a line, plain or .gz
    parquet:GLOB[#COLUMN]
    hf:NAME[,CONFIG][:SPLIT][#COLUMN]       of the hub, or a folder; read as a stream
    chat:GLOB[#COLUMN]                      jsonl: of conversations (chats.py); before `parquet:`
                                            and `hf:`, too

A shard is a file, or a shard of the stream. Its documents come in the order in which they stand in
it, so the same data set gives the same tokens on every machine.
"""

import glob
import gzip
import hashlib
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import blake3

from protocol.run.run_spec import STDLIB_BYTES

from .chats import CHAT, MESSAGES, Passage
from .packed import InvalidCorpus, Text, check_name

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
"""Folders that are no source of the library, or tables rather than text."""


def stdlib_texts() -> list[Text]:
    """Source files of this Python's standard library, chosen by the hash of their names.

    Another Python has other texts, so joiners fetch the founder's.
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
    """Files that match a glob, named by their path below its fixed part. Raises InvalidCorpus."""
    root = Path(pattern).expanduser().parent
    while glob.has_magic(str(root)):
        root = root.parent
    paths = _matching("text", pattern)
    return [Text(check_name(path.relative_to(root).as_posix()), path) for path in paths]


def _matching(kind: str, pattern: str) -> list[Path]:
    # Path.glob takes no absolute pattern.
    found = glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207
    paths = sorted(path for path in map(Path, found) if path.is_file())
    if not paths:
        raise InvalidCorpus(
            f"no file matches {kind}:{pattern}, seen from {Path.cwd()}:"
            " put yours there, or change it"
        )
    return paths


KINDS: Final = ("jsonl", "parquet", "hf")
DOCUMENT_KINDS: Final = (*KINDS, CHAT)
COLUMN: Final = "text"
SPLIT: Final = "train"
EXTRA: Final = "pip install 'loco-peer[data]'"
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a data set, whose tokens are kept when it is done.

    Attributes:
        name: within the data set: the same on every machine.
        identity: changes when its content may have changed; empty where it is not known.
        where: the file, or the data set as in the source.
        number, of: of a stream's shards.
        revision: the commit of a data set of the hub; empty where it is not known.
    """

    kind: str
    name: str
    identity: str
    where: str
    column: str
    number: int = 0
    of: int = 1
    revision: str = ""

    @property
    def place(self) -> str:
        """The place of a text, for people."""
        if self.kind != "hf":
            return self.where
        return f"hf:{self.where}, shard {self.number} of {self.of}"

    def place_of(self, number: int) -> str:
        """The place of a document of it, for people."""
        return f"{self.place}, {'line' if self.kind == 'jsonl' else 'row'} {number}"


def shards_of(kind: str, where: str) -> list[Shard]:
    """The shards of a source, in order. Raises InvalidCorpus."""
    usual = COLUMN
    if kind == CHAT:
        usual, kind, where = MESSAGES, *_kind_of_chat(where)
    place, _, column = where.partition("#")
    column = column or usual
    return _stream_shards(place, column) if kind == "hf" else _files(kind, place, column)


def _kind_of_chat(where: str) -> tuple[str, str]:
    kind, _, rest = where.partition(":")
    return (kind, rest) if kind in KINDS else ("jsonl", where)


@dataclass(slots=True)
class ShardRead:
    """How much of a shard was read; of a stream's nobody knows."""

    share: float = 0.0


def text_passage(text: Any) -> list[Passage]:
    """A text as a document. Raises ValueError: it is not a text."""
    if not isinstance(text, str):
        raise ValueError(f"holds {type(text).__name__}, not text")
    return [(text, False)]


def documents(
    shard: Shard,
    reading: ShardRead | None = None,
    passages: Callable[[Any], list[Passage]] = text_passage,
) -> Iterator[tuple[int, list[Passage]]]:
    """The documents of a shard, each with its number for `Shard.place_of`. Raises InvalidCorpus.

    Args:
        passages: makes one of what the column holds; raises ValueError.
    """
    read = {"jsonl": _json_lines, "parquet": _parquet_rows, "hf": _stream_rows}[shard.kind]
    for number, found in read(shard, reading or ShardRead()):
        try:
            made = passages(found)
        except ValueError as error:
            raise InvalidCorpus(
                f"{shard.place_of(number)}: column {shard.column!r} {error};"
                " mend or remove it, or name another column with #COLUMN"
            ) from error
        yield number, [(_whole_characters(text), given) for text, given in made]


def _whole_characters(text: str) -> str:
    """Replace halves of characters, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
    return text


def _unreadable(shard: Shard, after: int | None, error: Exception) -> InvalidCorpus:
    """The error of a shard that cannot be read after the document of this number."""
    place = shard.place if after is None else f"{shard.place_of(after)} and after"
    said = error.strerror if isinstance(error, OSError) and error.strerror else error
    return InvalidCorpus(
        f"{place}: cannot be read: {said}; it may be damaged or cut off: fetch it again, or leave"
        " it out of the source"
    )


def _files(kind: str, pattern: str, column: str) -> list[Shard]:
    return [
        Shard(kind, check_name(path.name), _identity(path), str(path.absolute()), column)
        for path in _matching(kind, pattern)
    ]


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}/{status.st_mtime_ns}"


def _json_lines(shard: Shard, reading: ShardRead) -> Iterator[tuple[int, Any]]:
    path, number = Path(shard.where), None
    try:
        with (
            path.open("rb") as file,
            gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file as lines,
        ):
            size_bytes = max(1, path.stat().st_size)
            for number, line in enumerate(lines, 1):
                reading.share = file.tell() / size_bytes
                if line.strip():
                    yield number, _column_of(line, shard, number)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(shard, number, error) from error


def _column_of(line: bytes, shard: Shard, number: int) -> Any:
    try:
        return json.loads(line)[shard.column]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise InvalidCorpus(
            f"{shard.place_of(number)}: no JSON object with a column {shard.column!r}; mend or"
            " remove it, or name another column with #COLUMN"
        ) from error


def _parquet_rows(shard: Shard, reading: ShardRead) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InvalidCorpus(f"parquet: needs pyarrow: {EXTRA}") from error
    last = None
    try:
        with pq.ParquetFile(shard.where) as file:
            _check_column(shard.where, shard.column, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1024, columns=[shard.column]):
                begin = 0 if last is None else last + 1
                reading.share = begin / file.metadata.num_rows
                for last, text in enumerate(batch.column(0).to_pylist(), begin):
                    yield last, text
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(shard, last, error) from error


def _check_column(where: str, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise InvalidCorpus(
            f"{where} has no column {column!r}, but {', '.join(names)}: add #COLUMN"
        )


def _stream_shards(place: str, column: str) -> list[Shard]:
    source = _source_of(place)
    revision = "" if source.here else _revision_of(source.name)
    identity = _identity_of_folder(Path(source.name)) if source.here else revision
    total = _stream(place, revision).num_shards
    return [
        Shard("hf", f"{number:06d}", identity, place, column, number, total, revision)
        for number in range(total)
    ]


def _identity_of_folder(folder: Path) -> str:
    """Changes when a file of the folder comes, goes or is written."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    told = [(os.fsencode(path.relative_to(folder)).hex(), _identity(path)) for path in found]
    return blake3.blake3(json.dumps(told).encode()).hexdigest(length=16)


def _revision_of(name: str) -> str:
    """The commit at which a data set of the hub stands; empty where the hub does not say."""
    try:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(name, timeout=30.0).sha or ""
    except Exception:  # noqa: BLE001 - the hub client has a tree of its own for each way to fail
        return ""


def _stream_rows(shard: Shard, _: ShardRead) -> Iterator[tuple[int, Any]]:
    part = _stream(shard.where, shard.revision).shard(num_shards=shard.of, index=shard.number)
    number = None
    try:
        for number, row in enumerate(part):
            if shard.column not in row:
                _check_column(shard.place, shard.column, list(row))
            yield number, row[shard.column]
    except InvalidCorpus:
        raise
    except Exception as error:  # the library has a tree of its own for each way to fail
        raise _unreadable(shard, number, error) from error


def _stream(place: str, revision: str) -> Any:
    """An iterable data set, at this commit of the hub if one is given. Raises InvalidCorpus."""
    try:
        import datasets
    except ImportError as error:
        raise InvalidCorpus(f"hf: needs datasets: {EXTRA}") from error
    source = _source_of(place)
    try:
        if source.here and (Path(source.name) / "state.json").is_file():
            kept = datasets.load_from_disk(source.name)
            name = str(kept.split or SPLIT)
            if source.split not in (None, name):
                raise InvalidCorpus(
                    f"hf:{place}: the folder holds one split, {name}, and no {source.split}"
                )
            return kept.to_iterable_dataset(num_shards=min(64, max(1, len(kept))))
        return datasets.load_dataset(
            source.name,
            source.config,
            split=source.split or SPLIT,
            streaming=True,
            revision=revision or None,
        )
    except InvalidCorpus:
        raise
    except Exception as error:  # the library has a tree of its own for each way to fail
        raise InvalidCorpus(f"cannot open hf:{place}: {error}") from error


@dataclass(frozen=True, slots=True)
class _StreamSource:
    """The parts of `NAME,CONFIG:SPLIT`; `here` is whether it is a folder of this machine."""

    name: str
    config: str | None
    split: str | None
    here: bool


def _source_of(place: str) -> _StreamSource:
    named, _, split = place.partition(":")
    name, _, config = named.partition(",")
    folder = Path(name).expanduser()
    here = folder.exists()
    return _StreamSource(str(folder) if here else name, config or None, split or None, here)
