"""How peers, sizes and durations are named to people, and foreign text is shown to them."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

NAMED: Final = 3
"""Peers, and addresses, that a sentence names."""
LISTED: Final = 8
"""Peers, machines, paths or links that a list of them shows."""


def short_id(peer_id: str | None) -> str:
    """The last eight characters of a peer id: the first ones are the same in all of them."""
    return peer_id[-8:] if peer_id else "-"


def size_text(count: float) -> str:
    """A number of bytes, in GB or MB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6)):,} MB"


def duration(seconds: float) -> str:
    """Such as `40 s`, `6 min`, `3.5 h`, `2.1 days`: two of a unit at the least."""
    for unit, length, digits in (("days", 86_400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def nearest(name: str, known: Iterable[str], most: int = 1) -> str:
    """The end of a sentence on an unknown name: names that may be meant, if any is near."""
    near = difflib.get_close_matches(name, list(known), most)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def printable(text: str) -> str:
    """A line that does nothing to a terminal or a log: what cannot be shown is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def corpus_unheld(what: str, expert: str | None, asked: Sequence[str]) -> str:
    """The sentence that none of these peers has `what` of the corpus, and what would help."""
    corpus = "the run's corpus" if expert is None else f"the corpus of the expert '{expert}'"
    named = ", ".join(map(short_id, asked[-NAMED:])) or "nobody is linked"
    if len(asked) > NAMED:
        named += f" and {len(asked) - NAMED} more"
    return (
        f"none of {len(asked)} peers that were asked ({named}) has {what} of {corpus}: start one"
        " that has it again, or give the texts with --data"
    )
