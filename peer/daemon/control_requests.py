"""Answers to the commands of this home, which ask its daemon at the control socket.

`export --swarm` asks for one peer's slow weights at a time, so that the command can say how far it
is, and one vector is held at a time.

`amend` changes the run that is under way (protocol/run/amendments.py): what differs in a user's run
spec, from which round on it can be in force, and whether that makes sense, is found out; then it is
signed and told to all. When the run is closed to some, peers that are linked with us are admitted
by a ruling each: whoever is in stays in.
"""

import os
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import trio

from peer.content.fetching import fetch_from
from peer.facts import Facts, HeldPart, PeerState
from peer.network.identity import SEED_BYTES
from peer.observe.control import Handler, NotNow
from peer.rounds.pause import Pause, PauseRefused
from peer.runtime import PeerId
from protocol.address.peer_id import peer_id_to_bytes
from protocol.admission.statements import Verdict
from protocol.errors import LocoError, RemoteProtocolError
from protocol.membership.group import Group
from protocol.membership.view import TRAINING, View
from protocol.names import LISTED
from protocol.run.amendments import (
    MODE,
    TOTAL_STEPS,
    AmendedSpec,
    Changes,
    changed,
    changes_between,
    expert_in,
    new_peers,
    value_of,
)
from protocol.run.run_spec import RunSpec
from protocol.schedule.rounds import middle

from .expert_requests import expert_claims, scores_of
from .experts import ExpertPeers
from .parts import PeerParts
from .peer import Peer
from .report import join_address
from .services import DaemonServices
from .sources import FETCH_WEIGHTS_S, Weights, weights_from, weights_of


class ControlRequests:
    """Answers them, each by a method; arguments and replies are JSON."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def handlers(self) -> dict[str, Handler]:
        return {
            "status": self.status,
            "snapshot": self.snapshot,
            "leave": self.leave,
            "write_state": self.write_state,
            "score_text": self.score_text,
            "holders": self.holders,
            "fetch_weights": self.fetch_weights,
            "expert_claims": self.expert_claims,
            "keep_together": self.keep_together,
            "pause": self.pause,
            "resume": self.resume,
            "invite": self.invite,
            "rule": self.rule,
            "amend": lambda wanted: amend(self._peer.parts, wanted),
            "name_successor": self.name_successor,
        }

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        return self._peer.parts.report.status().to_json()

    async def snapshot(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return self._peer.parts.report.snapshot(history=bool(wanted.get("history")))

    async def leave(self, _: dict[str, Any]) -> dict[str, Any]:
        self._peer.request_stop()
        return {"grace_s": self._peer.settings.grace_s}

    async def write_state(self, _: dict[str, Any]) -> dict[str, Any]:
        """Raises NotNow: there is no state yet."""
        training = self._peer.training
        written = None if training is None else await training.service.write()
        if written is None:
            raise NotNow("there is no state yet; try again when this peer is training")
        path, manifest = written
        scalars, part = manifest.scalars, self._held().group.part
        return {"path": str(path), "part": part, "round": scalars.round, "tokens": scalars.tokens}

    async def fetch_weights(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Write the slow weights of a part of the model to a file, fp32 values alone.

        Args:
            wanted: the `part`, its `padded_parameters`, and the `peer`, where not any will do.

        Raises LocoError.
        """
        parts, part, size = self._peer.parts, wanted["part"], wanted["padded_parameters"]
        view = View(parts.roster, Group(self._held().group.run_id, part).digest)
        if (peer_id := wanted.get("peer")) is None:
            given = await _weights_of_any(parts, view, part.replace("/", " "), size)
        else:
            async with fetch_from(parts.network, peer_id) as client:
                given = await weights_from(client, view.group, size)
        _, slow_P, told = given
        path = self._peer.settings.state_dir / f"{part.replace('/', '-')}.f32"
        await parts.work.run(slow_P.tofile, path)
        return {"path": str(path), "step": told.step, "round": told.round, "tokens": told.tokens}

    async def score_text(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Log-probabilities of a text's tokens but the first, by experts, named by their parts."""
        parts, tokens = self._peer.parts, np.array(wanted["tokens"], np.uint32)
        held, training = self._held(), self._peer.training
        own = None if training is None else training.score
        scores = await scores_of(parts, held, wanted["parts"], tokens, own)
        told = {part: each.tolist() for part, each in scores.items() if not isinstance(each, str)}
        failed = {part: each for part, each in scores.items() if isinstance(each, str)}
        return {"log_probs": told, "failed": failed}

    async def holders(self, _: dict[str, Any]) -> dict[str, Any]:
        alive = self._held().view.alive(trio.current_time())
        return {"peers": [member.peer_id for member in alive]}

    async def expert_claims(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Claims of a peer of an expert on all domains. Raises LocoError."""
        training = self._peer.training
        domains = None if training is None else training.domains
        return await expert_claims(self._peer.parts, domains, wanted["expert"])

    async def keep_together(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Show these losses of the ensemble, by domain, in `status`."""
        losses = {int(number): float(loss) for number, loss in wanted["losses"].items()}
        self._peer.parts.facts.losses_together = losses
        return {}

    def _held(self) -> HeldPart:
        held = self._peer.parts.facts.held
        if held is None or self._peer.training is None:
            raise LocoError("there is no state yet; try again when this peer is training")
        return held

    async def pause(self, _: dict[str, Any]) -> dict[str, Any]:
        self._pause().begin()
        return {}

    async def resume(self, _: dict[str, Any]) -> dict[str, Any]:
        self._pause().end()
        return {}

    def _pause(self) -> Pause:
        training = self._peer.training
        if training is None or training.rounds is None:
            raise PauseRefused("this peer does not train yet; try again when it does")
        return training.rounds.pause

    async def invite(self, wanted: dict[str, Any]) -> dict[str, Any]:
        parts, seed = self._peer.parts, os.urandom(SEED_BYTES)
        token = parts.admission.invite(seed, float(wanted["lasts_s"]), int(wanted["uses"]))
        best = join_address(parts.network, parts.facts)
        return {"token": token.text, "address": best.address, "note": best.note}

    async def rule(self, wanted: dict[str, Any]) -> dict[str, Any]:
        parts, verdict = self._peer.parts, Verdict(wanted["verdict"])
        peer_id, own_id = named_peer(wanted["peer"], self._known()), parts.facts.peer_id
        if verdict is Verdict.BAN and peer_id == own_id and parts.admission.may_sign:
            raise LocoError("that is this peer itself; to end it: loco-peer leave")
        parts.links.tell_statements(parts.admission.rule(verdict, peer_id))
        return {"peer": peer_id}

    async def name_successor(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Raises LocoError: this home cannot, or the run goes on elsewhere in any case."""
        parts = self._peer.parts
        if parts.facts.expert_run is not None:
            raise LocoError("peers of a run with experts go over to others of it, and follow none")
        told = parts.admission.name_successor(wanted["run_id"], wanted["address"])
        parts.links.tell_statements(told)
        return {}

    def _known(self) -> frozenset[PeerId]:
        """Peers that were here, and those that were ruled on: a banned one is not here."""
        parts = self._peer.parts
        members = {member.peer_id for member in parts.roster.members()}
        return frozenset(members | parts.admission.known_peers | {parts.facts.peer_id})


async def _weights_of_any(parts: PeerParts, view: View, named: str, size: int) -> Weights:
    """Raises LocoError: nobody gives them."""
    if not view.alive(trio.current_time()):
        raise LocoError(f"no peer that we see holds {named}; try again when one does")
    given = await weights_of(parts.sources, view, size)
    if given is None:
        raise LocoError(f"nobody gave the weights of {named} within {FETCH_WEIGHTS_S:.0f} s")
    return given


def named_peer(text: str, known: Collection[PeerId]) -> PeerId:
    """The peer that a user means: a whole id, or the end of the one known id that ends so.

    Raises:
        LocoError: no peer is known by that end, or several are.
    """
    try:
        peer_id_to_bytes(text)
    except RemoteProtocolError:
        pass
    else:
        return text
    meant = sorted(peer_id for peer_id in known if peer_id.endswith(text))
    if len(meant) == 1:
        return meant[0]
    if not meant:
        raise LocoError(
            f"no peer is known here whose id ends in {text}; `loco-peer status --verbose` shows"
            " whole ids, and a whole id is taken of peers that are not here, too"
        )
    named = ", ".join(meant[:LISTED])
    raise LocoError(f"{len(meant)} peers have ids that end in {text}; give more of one: {named}")


LEAD_ROUNDS: Final = 3
"""Rounds before an amendment takes effect, unless the user says another number: a statement reaches
all within seconds, and peers that gossip can be two rounds apart."""


async def amend(parts: PeerParts, wanted: dict[str, Any]) -> dict[str, Any]:
    """Sign an amendment and tell all, or say what it would be. Raises LocoError, InvalidRunSpec."""
    spec, admission = _known_run(parts.facts), parts.admission
    admission.founder()  # a dry run that could not be done in earnest says so
    before, changes = spec.run, changes_between(spec.run, wanted["values"])
    number = _expert_of(before, changes)
    if number is not None:
        spec = spec.of_expert(number)
    elif parts.facts.run_over or parts.facts.state is PeerState.FINISHED:  # others may train on
        raise LocoError("the run has ended and cannot be amended")
    peers = new_peers(spec.founding, wanted["values"])
    if not changes and all(admission.refusal_of(peer) is None for peer in peers):
        raise LocoError("nothing to amend: the run already has these values")
    end = spec.own(changed(before, changes)).total_rounds  # its values can be used
    from_round = present = _present_round(parts, spec, number)
    if any(key != MODE for key, _ in changes):
        from_round = _from_round(spec, present, end, wanted["at_round"])
    elif wanted["at_round"] is not None:
        raise LocoError("--at-round: admission changes at once; leave this option out")
    if not wanted["dry_run"]:
        admitted = list(peers)
        if MODE in dict(changes):
            linked = [member.peer_id for member in parts.roster.alive(trio.current_time())]
            admitted += [peer for peer in linked if admission.refusal_of(peer) is None]
            admitted.append(parts.facts.peer_id)
        parts.links.tell_statements(admission.amend(from_round, changes, admitted))
    return {
        "changes": [[key, value_of(before, key), value] for key, value in changes],
        "admitted": list(peers),
        "round": from_round,
        "step": from_round * spec.founding.sync.round_steps,
        "present": present,
        "end": end,
    }


def _known_run(facts: Facts) -> AmendedSpec:
    """Raises LocoError: there is no run to amend, now."""
    if facts.spec is None or facts.held is None:
        raise LocoError("the run is not known yet; try again when this peer is training")
    if facts.state is PeerState.RETURNING:
        raise LocoError(
            "this peer has just returned and does not know the run's current step yet;"
            " try again when `loco-peer status` says that it trains"
        )
    return facts.spec


def _expert_of(run: RunSpec, changes: Changes) -> int | None:
    """The expert that is amended, if one is. Raises LocoError: something else is, too."""
    names = [name for name in (expert_in(key) for key, _ in changes) if name is not None]
    if names and len(changes) > 1:
        raise LocoError(
            f"an expert counts rounds of its own: amend its steps ({names[0]}'s first) in a file"
            " that changes nothing else"
        )
    return run.expert_named(names[0]) if names else None


def _present_round(services: DaemonServices, spec: AmendedSpec, expert: int | None) -> int:
    """The round of an expert; where none is given ours, or that of the middle of the others."""
    if expert is not None:
        step = ExpertPeers(services.roster, services.facts).step_of(expert)
        return step // spec.founding.sync.round_steps
    others, own = services.roster.alive(trio.current_time()), services.facts.step
    steps = [member.progress.step for member in others if member.progress.state == TRAINING]
    known = [step for step in steps if step <= spec.longest_steps]
    return int(max(own, middle(known, own))) // spec.founding.sync.round_steps


def _from_round(spec: AmendedSpec, present: int, total: int, at_round: int | None) -> int:
    """Args: total: rounds of the run as it is to be. Raises LocoError: that cannot be."""
    end = spec.end_round
    from_round = min(present + LEAD_ROUNDS, end) if at_round is None else at_round
    if end <= present:
        raise LocoError("the run is in its last round, or over, and can no longer be amended")
    if from_round <= present:
        raise LocoError(
            f"--at-round: the run is in round {present}; name a later one, so that all peers"
            f" hear of it in time ({present + LEAD_ROUNDS} is the default)"
        )
    if from_round > end:
        raise LocoError(f"--at-round: the run ends with round {end}, before round {from_round}")
    if total < from_round:
        steps = spec.founding.sync.round_steps
        raise LocoError(
            f"{TOTAL_STEPS}: with this value the run would end with round {total}, before"
            f" round {from_round}, when it takes effect; it can end at step"
            f" {from_round * steps} at the earliest"
        )
    return from_round
