"""The conversations that we speak, and the sentence for two peers that share none.

A conversation has a libp2p protocol id, `/loco/<name>/<major>`; in a Hello it is shortened to
`<name>/<major>`. A major version changes when an old peer would misunderstand a new one; what old
peers may safely overlook changes no number (messages.py). A peer may speak several majors of one
conversation. To train together two peers must share one of each conversation in `REQUIRED`, or in
`REQUIRED_OF_STAGES` where the model is cut into stages.
"""

from collections.abc import Iterable
from typing import Final

HELLO: Final = "/loco/hello/1"
GOSSIP: Final = "/loco/gossip/1"
CONTENT: Final = "/loco/content/2"
FRAGMENT: Final = "/loco/fragment/1"
STAGE: Final = "/loco/stage/3"
REACH: Final = "/loco/reach/1"
DIRECTORY: Final = "/loco/directory/1"

ROOT: Final = "/loco/"
SPOKEN: Final = tuple(
    each.removeprefix(ROOT) for each in (HELLO, GOSSIP, CONTENT, FRAGMENT, STAGE, REACH, DIRECTORY)
)
REQUIRED: Final = ("hello", "gossip", "content")
REQUIRED_OF_STAGES: Final = (*REQUIRED, "stage")


def missing(
    ours: Iterable[str], theirs: Iterable[str], required: Iterable[str] = REQUIRED
) -> tuple[str, ...]:
    """The required conversations that they share no major of; none if they can train together."""
    shared = dict(map(_split, set(ours) & set(theirs)))
    return tuple(name for name in required if name not in shared)


def version_sentence(
    ours: Iterable[str],
    theirs: Iterable[str],
    our_software: str,
    their_software: str,
    required: Iterable[str] = REQUIRED,
) -> str:
    """Why a peer is refused: what they speak, what we speak, what to install. Written to them."""
    ours, theirs = tuple(ours), tuple(theirs)
    names = missing(ours, theirs, required)
    cure = _cure(ours, theirs, names, our_software, their_software)
    return (
        f"we share no version of {_listed(names)}: you ({their_software}) speak "
        f"{_listed(theirs)}; I ({our_software}) speak {_listed(ours)}. {cure}"
    )


def _cure(
    ours: tuple[str, ...], theirs: tuple[str, ...], names: tuple[str, ...], us: str, them: str
) -> str:
    if all(_newest(name, theirs) <= _newest(name, ours) for name in names):
        return f"Install {us} on your machine: pip install -U {_requirement(us)}"
    return f"You are ahead of this swarm: install {us} on your machine, or ask it to move to {them}"


def _newest(name: str, protocols: tuple[str, ...]) -> int:
    return max((major for other, major in map(_split, protocols) if other == name), default=0)


def _requirement(software: str) -> str:
    name, _, version = software.partition(" ")
    return f"{name}=={version}" if version else name


def _split(short: str) -> tuple[str, int]:
    name, _, major = short.partition("/")
    return name, int(major)


def _listed(items: Iterable[str]) -> str:
    return ", ".join(items) or "nothing"
