"""Claims of one peer of each expert on all domains, for `loco-peer eval`."""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import trio

from peer.experts.conversation import ask_expert, log_probs_of
from peer.network.conversation import Conversation
from peer.observe.control import NotNow
from peer.rounds.domains import HeldOutBlocks, MeasuredDomains, ToldLogProbs
from peer.runtime import PeerId
from protocol.errors import LocoError, Refused
from protocol.membership.group import Group
from protocol.membership.view import View
from protocol.outcomes import RefusalReason
from protocol.run.layout import part_of_expert

from .ports import Ports

Claims = Mapping[int, ToldLogProbs]
"""Claims of a peer, by the number of the domain."""


async def expert_claims(
    ports: Ports, domains: MeasuredDomains | None, number: int
) -> dict[str, Any]:
    """Claims on all domains that are here, of the first peer of an expert that can tell.

    Raises NotNow: we do not train yet. LocoError: no peer of the expert told anything; why.
    """
    facts = ports.facts
    if domains is None or facts.run_id is None:
        raise NotNow("this peer does not train yet; try again when it does")
    if number == domains.own:
        told = {each.number: domains.told.get(each.digest) for each in domains.in_turn}
        return _reply(facts.peer_id, told.items(), own=True)
    group, whys = Group(facts.run_id, part_of_expert(number)).digest, list[str]()
    for member in View(ports.roster, group).alive(trio.current_time()):
        try:
            claims = await _claims_of(ports, member.peer_id, group, domains.in_turn)
        except LocoError as error:
            whys.append(str(error))
            continue
        if claims:
            return _reply(member.peer_id, claims.items(), own=False)
        whys.append(f"{member.peer_id} has measured no domain yet")
    raise LocoError(whys[0] if whys else "no peer that we see trains it")


async def _claims_of(
    ports: Ports, peer_id: PeerId, group: str, domains: Iterable[HeldOutBlocks]
) -> Claims:
    """Those of a peer, of the domains that it has measured. Raises LocoError."""
    claims = dict[int, ToldLogProbs]()
    async with await ask_expert(ports.network, peer_id) as talk:
        for domain in domains:
            claims.update(await _claim_of(talk, group, domain))
    return claims


async def _claim_of(talk: Conversation, group: str, domain: HeldOutBlocks) -> Claims:
    try:
        told = await log_probs_of(talk, group, domain.digest, domain.claims)
    except Refused as refused:
        if refused.reason is not RefusalReason.UNAVAILABLE:
            raise
        return {}
    return {domain.number: told}


def _reply(
    peer_id: PeerId, claims: Iterable[tuple[int, ToldLogProbs | None]], *, own: bool
) -> dict[str, Any]:
    return {"peer": peer_id, "own": own, "claims": dict(_as_json(claims))}


def _as_json(claims: Iterable[tuple[int, ToldLogProbs | None]]) -> Iterator[tuple[str, Any]]:
    for number, told in claims:
        if told is not None:
            values = b64encode(told.log_probs.astype("<f4").tobytes()).decode()
            yield str(number), {"stamp": told.stamp, "step": told.step, "log_probs": values}
