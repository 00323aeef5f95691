"""Changes of a run spec: what may be amended in a run that is under way, and what may not.

A change is one key of the run spec, with dots, and its new value. What peers agree on once (model,
data, seed, how they average) stays what it was, for weights that were trained in another way cannot
be averaged. What may change is how long the run lasts, how fast it learns, and who may join.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from protocol.errors import InvalidRunSpec

from .run_spec import RunSpec, what_is_wrong

TOTAL_STEPS: Final = "training.total_steps"
LEARNING_RATE: Final = "optimizer.learning_rate"
MODE: Final = "admission.mode"
AMENDABLE: Final = (MODE, LEARNING_RATE, TOTAL_STEPS)
FOUND_OUT: Final = ("frozen", "data.manifest", "data.tokenizer_digest", "admission.secret_digest")
"""Keys that the founder's machine fills in."""
PEERS: Final = "admission.peers"

Value = int | float | str
Changes = tuple[tuple[str, Value], ...]
"""Keys and values, sorted by key."""


def changed(spec: RunSpec, changes: Changes) -> RunSpec:
    """The run spec with these changes.

    Raises:
        InvalidRunSpec: a key may not be amended, or its value cannot be used.
    """
    for key, value in changes:
        if key not in AMENDABLE:
            raise InvalidRunSpec(_not_amendable(key))
        section, _, name = key.partition(".")
        spec = spec.model_copy(update={section: _with(getattr(spec, section), name, key, value)})
    return spec


def _with(section: Any, name: str, key: str, value: Value) -> Any:
    """A section with one other value, which is checked by itself: keys are amended one by one."""
    try:
        checked = type(section).model_validate({name: value})
    except ValidationError as error:
        why = what_is_wrong(error.errors()[0])
        raise InvalidRunSpec(f"{key}: {why} (got {value!r})") from error
    return section.model_copy(update={name: getattr(checked, name)})


def values_of(spec: RunSpec, written: Mapping[str, Any]) -> dict[str, Any]:
    """What `spec` says of each key that a user has written, as plain values by dotted key.

    Args:
        written: the tree of the user's TOML.
    """
    return {key: value_of(spec, key) for key in _keys(written)}


def differing_keys(founding: RunSpec, wanted: RunSpec) -> list[str]:
    """Keys in which a user's run spec is not that of a run that was founded by it.

    Args:
        founding: with what its founder found out, which no user writes.
    """
    keys = sorted({*_keys(founding.model_dump()), *_keys(wanted.model_dump())})
    written = (key for key in keys if not key.startswith(FOUND_OUT))
    return [key for key in written if value_of(founding, key) != value_of(wanted, key)]


def value_of(spec: RunSpec, key: str) -> Any:
    """What `spec` says of a key, as a plain value; None where its section is left out."""
    tree: Any = spec.model_dump(mode="json")
    for name in key.split("."):
        tree = None if tree is None else tree[name]
    return tree


def _keys(tree: Mapping[str, Any]) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{rest}" for rest in _keys(value))
        else:
            yield name


def changes_between(spec: RunSpec, wanted: Mapping[str, Any]) -> Changes:
    """What is to be amended so that `spec` says what is wanted, but for `admission.peers`.

    Args:
        wanted: values by dotted key; a key that is not in it stays as it is.

    Raises:
        InvalidRunSpec: something else differs; the sentence names it.
    """
    found: list[tuple[str, Value]] = []
    for key, value in sorted(wanted.items()):
        if key != PEERS and value != value_of(spec, key):
            if key not in AMENDABLE:
                raise InvalidRunSpec(_not_amendable(key))
            found.append((key, value))
    return tuple(found)


def new_peers(spec: RunSpec, wanted: Mapping[str, Any]) -> tuple[str, ...]:
    """The peers that `admission.peers` names beside those of `spec`.

    Raises:
        InvalidRunSpec: it leaves some out.
    """
    if PEERS not in wanted:
        return ()
    listed = set(wanted[PEERS])
    if left_out := [peer for peer in spec.admission.peers if peer not in listed]:
        raise InvalidRunSpec(
            f"{PEERS}: a peer is not taken off the list; `loco-peer ban {left_out[0]}` keeps it out"
        )
    return tuple(sorted(listed.difference(spec.admission.peers)))


def _not_amendable(key: str) -> str:
    may = ", ".join((*AMENDABLE, PEERS))
    return (
        f"{key}: this differs from the run's, and cannot be amended in a run that is under way;"
        f" what can is {may}. Give it the run's value, or leave it out"
    )
