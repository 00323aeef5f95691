"""The conversations that we speak, and the sentence for two peers that share none.

A conversation has a libp2p protocol id, `/loco/<name>/<major>`; in a Hello it is shortened to
`<name>/<major>`. A major version changes when an old peer would misunderstand a new one; what old
peers may safely overlook changes no number (messages.py). A peer may speak several majors of one
conversation. To train together two peers must share one of each conversation in `REQUIRED` and of
those that their run needs (`conversations_of` in protocol/run/ways.py).

Peers of different versions find out about each other by `/loco/hello/1`, so all later versions
answer it too: at least with a refusal, to a Hello that says which majors they speak.
"""

import re
from collections.abc import Iterable
from typing import Final

HELLO: Final = "/loco/hello/1"
GOSSIP: Final = "/loco/gossip/1"
CONTENT: Final = "/loco/content/2"
FRAGMENT: Final = "/loco/fragment/1"
STAGE: Final = "/loco/stage/3"
EXPERTS: Final = "/loco/experts/1"
REACH: Final = "/loco/reach/1"
DIRECTORY: Final = "/loco/directory/1"

ROOT: Final = "/loco/"
SPOKEN: Final = tuple(
    each.removeprefix(ROOT)
    for each in (HELLO, GOSSIP, CONTENT, FRAGMENT, STAGE, EXPERTS, REACH, DIRECTORY)
)
REQUIRED: Final = ("hello", "content")
_RELEASE: Final = re.compile(r"loco-peer (\d[0-9A-Za-z.+-]*)")


def missing(ours: Iterable[str], theirs: Iterable[str], required: Iterable[str]) -> tuple[str, ...]:
    """The required conversations that they share no major of; none if they can train together."""
    shared = dict(map(_split, set(ours) & set(theirs)))
    return tuple(name for name in required if name not in shared)


def version_sentence(
    yours: Iterable[str],
    others: Iterable[str],
    your_software: str,
    other_software: str,
    required: Iterable[str],
) -> str:
    """The conversations that two peers do not share, and a cure; for the user of the first."""
    yours, others = tuple(yours), tuple(others)
    names = missing(yours, others, required)
    cure = _cure(yours, others, names, your_software, other_software)
    return (
        f"we share no version of {', '.join(names)}: you ({your_software}) speak"
        f" {_spoken(names, yours)}; the other peer ({other_software}) speaks"
        f" {_spoken(names, others)}. {cure}"
    )


def _cure(
    yours: tuple[str, ...], others: tuple[str, ...], names: tuple[str, ...], you: str, other: str
) -> str:
    if you == other:
        return "One of them is no release: install the same build on both machines"
    if all(_newest(name, yours) <= _newest(name, others) for name in names):
        return f"Yours is older: on your machine, {how_to_install(other)}"
    return (
        f"Yours is newer: on the other machine, {how_to_install(you)}. Or, if the run stays with"
        f" {other}, on your machine, {how_to_install(other)}"
    )


def how_to_install(software: str) -> str:
    """The command for a version as a Hello names it, which may be a stranger's words."""
    release = _RELEASE.fullmatch(software)
    if release is None:
        return "install the loco-peer that it runs"
    return f"pip install loco-peer=={release[1]} (or an image of {release[1]})"


def _newest(name: str, protocols: tuple[str, ...]) -> int:
    return max((major for other, major in map(_split, protocols) if other == name), default=0)


def _spoken(names: tuple[str, ...], protocols: tuple[str, ...]) -> str:
    spoken = [short for short in protocols if _split(short)[0] in names]
    return ", ".join(spoken) or "none"


def _split(short: str) -> tuple[str, int]:
    name, _, major = short.partition("/")
    return name, int(major)
