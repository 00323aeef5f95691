"""What a version of loco-peer says to others: its rules for messages, and frames that it said."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from protocol.wire.messages import TYPES

FOLDER: Final = Path(__file__).parent / "wire"
UNTOLD: Final = ("title", "description")
"""Of a schema: words for people."""


@dataclass(frozen=True, slots=True)
class Said:
    """The header of a message: who said it in which run, or nobody, and in which conversation."""

    by: str
    conversation: str
    kind: str
    header: bytes


@dataclass(frozen=True, slots=True)
class RecordedWire:
    """A version.

    Attributes:
        commit: of its tree.
        spoken: its conversations.
        rules: the JSON schema of each type of message, by its tag.
    """

    release: str
    commit: str
    spoken: tuple[str, ...]
    rules: Mapping[str, Any]
    said: tuple[Said, ...]

    def write(self) -> Path:
        """Lines as short as they can be, so that a difference shows what has changed."""
        rules = ",\n".join(f"{json.dumps(tag)}: {_line(it)}" for tag, it in self.rules.items())
        said = ",\n".join(
            _line([it.by, it.conversation, it.kind, it.header.hex()]) for it in self.said
        )
        path = FOLDER / f"{self.release}.json"
        path.write_text(
            f'{{"commit": {_line(self.commit)},\n"spoken": {_line(self.spoken)},\n'
            f'"rules": {{\n{rules}\n}},\n"said": [\n{said}\n]}}\n'
        )
        return path


def _line(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"))


def read(path: Path) -> RecordedWire:
    tree = json.loads(path.read_text())
    said = tuple(
        Said(by, conversation, kind, bytes.fromhex(header))
        for by, conversation, kind, header in tree["said"]
    )
    return RecordedWire(path.stem, tree["commit"], tuple(tree["spoken"]), tree["rules"], said)


def recorded_versions() -> list[RecordedWire]:
    return [read(path) for path in sorted(FOLDER.glob("*.json"))]


def rules_of_today() -> dict[str, Any]:
    """The JSON schema of each type of message, by its tag, with all that it refers to."""
    _, found = msgspec.json.schema_components(TYPES.values())
    components = json.loads(json.dumps(found))  # lists in place of tuples, as they are kept
    return {tag: _whole(components[kind.__name__], components) for tag, kind in TYPES.items()}


def _whole(schema: Any, components: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_whole(each, components) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _whole(components[schema["$ref"].rpartition("/")[2]] | rest, components)
    return {
        key: _whole(value, components)
        for key, value in schema.items()
        if key not in UNTOLD or isinstance(value, dict)
    }
