"""A text scored by one peer of each expert: log-probabilities of its tokens, for a posterior here.

What a peer claims decides only whose weights are fetched: these are weighed again by what they say
themselves, so a liar gains no more than a place among the few that are mixed.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy.typing as npt
import trio

from peer.experts.conversation import Score, ask_expert, score_of
from peer.facts import HeldPart
from protocol.errors import LocoError
from protocol.membership.group import Group
from protocol.membership.view import View

from .ports import Ports
from .sources import in_order

ASKED_OF_EXPERT: Final = 3
"""Peers of an expert, one after the other, until one can answer."""


async def scores_of(
    ports: Ports, held: HeldPart, parts: Sequence[str], tokens: npt.NDArray[Any], own: Score | None
) -> dict[str, npt.NDArray[Any] | str]:
    """Log-probabilities of the tokens but the first, by each part; or why nobody tells them."""
    found = dict[str, npt.NDArray[Any] | str]()

    async def ask(part: str) -> None:
        try:
            if part == held.group.part:
                found[part] = await _own(own, tokens)
            else:
                found[part] = await _of_others(ports, Group(held.group.run_id, part), tokens)
        except LocoError as error:
            found[part] = str(error)

    async with trio.open_nursery() as nursery:
        for part in parts:
            nursery.start_soon(ask, part)
    return found


async def _own(own: Score | None, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    told = None if own is None else await own(tokens)
    if told is None:
        raise LocoError("this peer has no trainer that can tell now")
    return told.log_probs


async def _of_others(ports: Ports, group: Group, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = View(ports.roster, group.digest)
    peers = in_order(view, ports.facts.peer_id, None)[:ASKED_OF_EXPERT]
    error = LocoError(f"no peer that we see holds {group.part.replace('/', ' ')}")
    for peer_id in peers:
        try:
            async with await ask_expert(ports.network, peer_id) as talk:
                return (await score_of(talk, group.digest, tokens)).log_probs
        except LocoError as failed:
            error = failed
    raise error
