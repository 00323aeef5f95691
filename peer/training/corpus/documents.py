"""Documents of a data set, shard by shard: JSON lines, parquet files, or a set of `datasets`.

A source names a data set and the column that holds the text:

    jsonl:GLOB[#COLUMN]                     files of one JSON object a line, plain or .gz
    parquet:GLOB[#COLUMN]
    hf:NAME[,CONFIG][:SPLIT][#COLUMN]       of the hub, or a folder; read as a stream

A shard is a file, or a shard of the stream. Its documents come in the order in which they stand in
it, so the same data set gives the same tokens on every machine.
"""

import glob
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .packed import InvalidCorpus

KINDS: Final = ("jsonl", "parquet", "hf")
COLUMN: Final = "text"
SPLIT: Final = "train"
EXTRA: Final = "pip install 'loco-peer[data]'"
BATCH_ROWS: Final = 1024
DISK_SHARDS: Final = 64
"""Into so many a folder that `save_to_disk` has written is divided."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a data set that one process reads.

    Attributes:
        name: within the data set: the same on every machine.
        identity: changes when its content may have changed.
        where: the file, or the data set as in the source.
        number, of: of a stream's shards.
    """

    kind: str
    name: str
    identity: str
    where: str
    column: str
    number: int = 0
    of: int = 1


def shards_of(kind: str, where: str) -> list[Shard]:
    """The shards of a source, in order. Raises InvalidCorpus."""
    place, _, column = where.partition("#")
    column = column or COLUMN
    return _stream_shards(place, column) if kind == "hf" else _files(kind, place, column)


def documents(shard: Shard) -> Iterator[str]:
    """The texts of a shard. Raises InvalidCorpus."""
    read = {"jsonl": _json_lines, "parquet": _parquet_rows, "hf": _stream_rows}[shard.kind]
    for row, text in enumerate(read(shard)):
        if not isinstance(text, str):
            raise InvalidCorpus(
                f"{shard.name}, row {row}: column {shard.column!r} holds {type(text).__name__},"
                " not text"
            )
        yield text


def _files(kind: str, pattern: str, column: str) -> list[Shard]:
    # Path.glob takes no absolute pattern.
    expanded = str(Path(pattern).expanduser())
    paths = sorted(Path(name) for name in glob.glob(expanded, recursive=True))  # noqa: PTH207
    files = [path.absolute() for path in paths if path.is_file()]
    if not files:
        raise InvalidCorpus(f"no file matches {kind}:{pattern}")
    return [Shard(kind, path.name, _identity(path), str(path), column) for path in files]


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}/{status.st_mtime_ns}"


def _json_lines(shard: Shard) -> Iterator[Any]:
    path = Path(shard.where)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)[shard.column]
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise InvalidCorpus(
                    f"{path}, line {number}: no JSON object with a column {shard.column!r}"
                ) from error


def _parquet_rows(shard: Shard) -> Iterator[Any]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InvalidCorpus(f"parquet: needs pyarrow: {EXTRA}") from error
    try:
        with pq.ParquetFile(shard.where) as file:
            _check_column(shard.where, shard.column, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[shard.column]):
                yield from batch.column(0).to_pylist()
    except OSError as error:  # pyarrow's own errors are OSError and ValueError
        raise InvalidCorpus(f"cannot read {shard.where}: {error}") from error


def _check_column(where: str, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise InvalidCorpus(
            f"{where} has no column {column!r}, but {', '.join(names)}: add #COLUMN"
        )


def _stream_shards(place: str, column: str) -> list[Shard]:
    stream = _stream(place)
    total = stream.num_shards
    identity = str(getattr(stream, "_fingerprint", "") or place)
    return [
        Shard("hf", f"{number:06d}", identity, place, column, number, total)
        for number in range(total)
    ]


def _stream_rows(shard: Shard) -> Iterator[Any]:
    part = _stream(shard.where).shard(num_shards=shard.of, index=shard.number)
    for row in part:
        if shard.column not in row:
            _check_column(shard.where, shard.column, list(row))
        yield row[shard.column]


def _stream(place: str) -> Any:
    """An iterable data set. Raises InvalidCorpus."""
    try:
        import datasets
    except ImportError as error:
        raise InvalidCorpus(f"hf: needs datasets: {EXTRA}") from error
    named, _, split = place.partition(":")
    name, _, config = named.partition(",")
    folder = Path(name).expanduser()
    try:
        if (folder / "state.json").is_file():
            kept = datasets.load_from_disk(str(folder))
            return kept.to_iterable_dataset(num_shards=min(DISK_SHARDS, max(1, len(kept))))
        name = str(folder) if folder.exists() else name
        return datasets.load_dataset(name, config or None, split=split or SPLIT, streaming=True)
    except Exception as error:  # the library has a tree of its own for each way to fail
        raise InvalidCorpus(f"cannot open hf:{place}: {error}") from error
