"""The version before this one and this one understand each other, or say that they do not.

What a major version of a conversation said once, it says as long as it has that number: fields may
come to it, with defaults, and nothing else changes (protocol/wire/messages.py). A change that these
tests refuse needs a new major of the conversation in protocol/wire/versions.py.
"""

from typing import Any, Final

import msgpack
import pytest
from recorded_wire import RecordedWire, Said, recorded_versions, rules_of_today

from bench.fuzzing.shots import messages_in
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Refusal, decode_message, encode_message
from protocol.wire.versions import ROOT, SPOKEN

VERSIONS: Final = recorded_versions()
TODAY: Final = rules_of_today()
each_version = pytest.mark.parametrize("before", VERSIONS, ids=lambda each: each.release)
REASONS: Final = "reason"
"""A list that may grow: a reason that is not known is read as `unavailable`."""


def tags_of(conversation: str) -> list[str]:
    return [str(kind.__struct_config__.tag) for kind in messages_in(conversation)]


def differences(before: Any, now: Any, where: str) -> list[str]:
    """What a peer of the version before would not understand, or would be refused for."""
    if before.get("type") != "object":
        if where.endswith(f".{REASONS}") and set(before["enum"]) <= set(now.get("enum", ())):
            return []
        return _of_items(before, now, where)
    fields, new = before["properties"], now.get("properties", {})
    found = [f"{where}.{name} is gone" for name in fields if name not in new]
    for name in fields.keys() & new.keys():
        found += differences(fields[name], new[name], f"{where}.{name}")
    added = new.keys() - fields.keys()
    found += [f"{where}.{name} is new and has no default" for name in added & {*now["required"]}]
    relaxed = {*before["required"]} ^ {*now["required"]}
    return found + [f"{where}.{name} is needed by one alone" for name in relaxed & fields.keys()]


def _of_items(before: Any, now: Any, where: str) -> list[str]:
    """The same of a value, or of the items of a list, which may be objects."""
    kept = {key: value for key, value in before.items() if key != "items"}
    if kept != {key: value for key, value in now.items() if key != "items"}:
        return [f"{where} is no longer {kept}"]
    items = before.get("items")
    return differences(items, now["items"], f"{where}[]") if isinstance(items, dict) else []


@each_version
def test_messages_of_a_major_are_what_they_were(before: RecordedWire) -> None:
    found = []
    for short in before.spoken:
        if short in SPOKEN:
            for tag, rules in before.rules.items():
                if tag in tags_of(ROOT + short):
                    found += differences(rules, TODAY[tag], tag)
    assert found == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"new": {"type": "integer", "default": 0}}, []),
        ({"reason": {"enum": ["busy", "met", "later"]}}, []),
        ({"reason": {"enum": ["busy"]}}, ["t.reason is no longer {'enum': ['busy', 'met']}"]),
        ({"step": {"type": "number"}}, ["t.step is no longer {'type': 'integer'}"]),
        ({"step": None}, ["t.step is gone"]),
    ],
)
def test_a_change_is_found(change: dict[str, Any], found: list[str]) -> None:
    fields: dict[str, Any] = {"step": {"type": "integer"}, "reason": {"enum": ["busy", "met"]}}
    changed = {name: it for name, it in (fields | change).items() if it is not None}
    before, now = (
        {"type": "object", "properties": it, "required": ["step"] * ("step" in it)}
        for it in (fields, changed)
    )
    assert [each for each in differences(before, now, "t") if "needed" not in each] == found


def spoken_today(said: Said) -> bool:
    return said.conversation.removeprefix(ROOT) in SPOKEN


@each_version
def test_what_was_said_is_read_as_it_was_meant(before: RecordedWire) -> None:
    for said in filter(spoken_today, before.said):
        message = decode_message(said.header)
        meant = msgpack.unpackb(said.header)
        again = msgpack.unpackb(encode_message(message))
        assert {key: again[key] for key in meant} == meant, said


@each_version
def test_every_type_was_recorded(before: RecordedWire) -> None:
    assert {msgpack.unpackb(said.header)["t"] for said in before.said} == {*before.rules}


def test_a_reason_of_a_later_version_is_one_that_may_pass() -> None:
    later = msgpack.packb({"t": "refusal", "reason": "asleep", "sentence": "Come at dawn."})
    assert decode_message(later) == Refusal(RefusalReason.UNAVAILABLE, "Come at dawn.")
