"""Questions of this home's commands to the peers of experts: claims on domains, scores of a text.

One peer of an expert after another is asked, until one can answer. What a peer says of a text
decides only whose weights are fetched: these are weighed again by what they say themselves, so a
liar gains no more than a place among the few that are mixed.
"""

from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt
import trio

from peer.experts.conversation import Score, ask_expert, log_probs_of, score_of
from peer.facts import HeldPart
from peer.network.conversation import Conversation
from peer.observe.control import NotNow
from peer.rounds.domains import MeasuredDomains, ToldLogProbs
from peer.runtime import PeerId
from protocol.errors import LocoError, Refused
from protocol.membership.group import Group
from protocol.membership.view import View
from protocol.outcomes import RefusalReason
from protocol.run.layout import part_of_expert

from .services import DaemonServices
from .sources import TRIES_FOR_ONE, in_order

T = TypeVar("T")
LogProbs = npt.NDArray[Any]


async def answer_of(
    services: DaemonServices, group: Group, ask: Callable[[Conversation], Awaitable[T]]
) -> tuple[PeerId, T]:
    """The first answer, and whose it is. Raises LocoError: why the last could not tell."""
    peers = in_order(View(services.roster, group.digest), services.facts.peer_id, None)
    error = LocoError(f"no peer that we see holds {group.part.replace('/', ' ')}")
    for peer_id in peers[:TRIES_FOR_ONE]:
        try:
            async with await ask_expert(services.network, peer_id) as talk:
                return peer_id, await ask(talk)
        except LocoError as failed:
            error = failed
    raise error


# --- scores ---------------------------------------------------------------------------------------
async def scores_of(
    services: DaemonServices,
    held: HeldPart,
    parts: Sequence[str],
    tokens: LogProbs,
    own: Score | None,
) -> dict[str, LogProbs | str]:
    """Log-probabilities of the tokens but the first, by each part; or why nobody tells them."""
    found = dict[str, LogProbs | str]()

    async def ask(part: str) -> None:
        group = Group(held.group.run_id, part)
        try:
            if group == held.group:
                found[part] = await _own(own, tokens)
            else:
                _, told = await answer_of(
                    services, group, partial(score_of, group=group.digest, tokens=tokens)
                )
                found[part] = told.log_probs
        except LocoError as error:
            found[part] = str(error)

    async with trio.open_nursery() as nursery:
        for part in parts:
            nursery.start_soon(ask, part)
    return found


async def _own(own: Score | None, tokens: LogProbs) -> LogProbs:
    told = None if own is None else await own(tokens)
    if told is None:
        raise LocoError("this peer has no trainer that can tell now")
    return told.log_probs


# --- claims ---------------------------------------------------------------------------------------
async def expert_claims(
    services: DaemonServices, domains: MeasuredDomains | None, number: int
) -> dict[str, Any]:
    """Claims on all domains that are here, of a peer of an expert that can tell.

    Raises NotNow: we do not train yet. LocoError: no peer of the expert told anything; why.
    """
    facts = services.facts
    if domains is None or facts.run_id is None:
        raise NotNow("this peer does not train yet; try again when it does")
    if number == domains.own:
        told = {each.number: domains.told.get(each.digest) for each in domains.in_turn}
        return _reply(facts.peer_id, told, own=True)
    group = Group(facts.run_id, part_of_expert(number))

    async def ask(talk: Conversation) -> dict[int, ToldLogProbs | None]:
        found = dict[int, ToldLogProbs | None]()
        for domain in domains.in_turn:
            try:
                found[domain.number] = await log_probs_of(
                    talk, group.digest, domain.digest, domain.claims
                )
            except Refused as refused:
                if refused.reason is not RefusalReason.UNAVAILABLE:
                    raise
        if not found:
            raise LocoError(f"{talk.remote_peer_id} has measured no domain yet")
        return found

    peer_id, claims = await answer_of(services, group, ask)
    return _reply(peer_id, claims, own=False)


def _reply(
    peer_id: PeerId, claims: Mapping[int, ToldLogProbs | None], *, own: bool
) -> dict[str, Any]:
    told = {str(number): _as_json(each) for number, each in claims.items() if each is not None}
    return {"peer": peer_id, "own": own, "claims": told}


def _as_json(told: ToldLogProbs) -> dict[str, Any]:
    values = b64encode(told.log_probs.astype("<f4").tobytes()).decode()
    return {"stamp": told.stamp, "step": told.step, "log_probs": values}
