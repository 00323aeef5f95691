"""What the commands of this home ask of its daemon, at the control socket; `amend` in amending.py.

`export --swarm` asks for one peer's slow weights at a time, so that the command can say how far it
is, and one vector is held at a time.
"""

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import trio

from peer.content.fetching import ExpectedState, fetch_from
from peer.content.gathering import whole_state
from peer.facts import HeldPart
from peer.network.identity import SEED_BYTES
from peer.observe.control import Handler, NotNow
from peer.ports import Entropy, PeerId
from peer.rounds.pause import Pause, PauseRefused
from protocol.address.peer_id import peer_id_to_bytes
from protocol.admission.statements import Verdict
from protocol.errors import LocoError, RemoteProtocolError
from protocol.membership.group import Group
from protocol.membership.view import View
from protocol.run.layout import part_of_stage

from .peer import Peer
from .report import Report, join_address
from .sources import fetch_weights

MAX_NAMED: Final = 8
"""Peers that are named to somebody whose short id is not clear."""
MAX_FETCH_S: Final = 3600.0
"""For one peer's weights; below the least rate it is left sooner (peer/content/fetching.py)."""


class ControlRequests:
    """Answers `status`, `leave`, `export`, `pause`, `resume`, `invite`, `admit`, `ban`, `delegate`.

    Args:
        entropy: seeds invitations.
    """

    def __init__(self, peer: Peer, report: Report, entropy: Entropy) -> None:
        self._peer = peer
        self._report = report
        self._entropy = entropy

    def handlers(self) -> dict[str, Handler]:
        """The handler of each request, by its name."""
        return {
            "status": self.status,
            "leave": self.leave,
            "write_state": self.write_state,
            "fetch_stage": self.fetch_stage,
            "holders": self.holders,
            "fetch_weights": self.fetch_weights,
            "pause": self.pause,
            "resume": self.resume,
            "invite": self.invite,
            "rule": self.rule,
        }

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        """The current status."""
        return self._report.status().to_json()

    async def leave(self, _: dict[str, Any]) -> dict[str, Any]:
        """Begin to leave."""
        self._peer.request_stop()
        return {"grace_s": self._peer.settings.grace_s}

    # --- weights ----------------------------------------------------------------------------------
    async def write_state(self, _: dict[str, Any]) -> dict[str, Any]:
        """Write the present state to a file. Raises NotNow: there is none yet."""
        service = self._peer.service
        written = None if service is None else await service.write()
        if written is None:
            raise NotNow("there is no state yet; try again when this peer is training")
        path, manifest = written
        scalars, part = manifest.scalars, self._held().group.part
        return {"path": str(path), "part": part, "round": scalars.round, "tokens": scalars.tokens}

    async def fetch_stage(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Write the slow weights of a stage that other peers hold to a file. Raises LocoError."""
        parts, stage = self._peer.parts, wanted["stage"]
        assert parts.facts.run_id is not None
        view = View(parts.roster, Group(parts.facts.run_id, part_of_stage(stage)).digest)
        if not view.alive(trio.current_time()):
            raise LocoError(f"no peer that we see holds stage {stage}; try again when one does")
        path = self._peer.settings.state_dir / f"stage-{stage}.f32"
        size = wanted["padded_parameters"]
        return {"path": str(await fetch_weights(parts.sources, view, size, path, parts.work))}

    async def holders(self, _: dict[str, Any]) -> dict[str, Any]:
        """The peers of our group that live, ourselves left out."""
        alive = self._held().view.alive(trio.current_time())
        return {"peers": [member.peer_id for member in alive]}

    async def fetch_weights(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Write the slow weights of a peer to a file, fp32 values alone. Raises LocoError."""
        parts, held = self._peer.parts, self._held()
        expected = ExpectedState(held.group.digest, layout_digest=held.shape.layout_digest)
        slow_P, momentum_P = np.zeros((2, held.shape.padded_parameters), np.float32)
        with trio.move_on_after(MAX_FETCH_S) as scope:
            async with fetch_from(parts.network, wanted["peer"]) as fetcher:
                state = await whole_state(fetcher, expected, slow_P, momentum_P)
        if scope.cancelled_caught:
            raise LocoError(f"its state did not come within {MAX_FETCH_S:.0f} s")
        path = self._peer.settings.state_dir / "others-weights.f32"
        await parts.work.run(slow_P.tofile, path)
        return {"path": str(path), "step": state.step}

    def _held(self) -> HeldPart:
        held = self._peer.parts.facts.held
        if held is None or self._peer.service is None:
            raise LocoError("there is no state yet; try again when this peer is training")
        return held

    # --- pauses -----------------------------------------------------------------------------------
    async def pause(self, _: dict[str, Any]) -> dict[str, Any]:
        """Rest after the round under way. Raises PauseRefused."""
        self._training().begin()
        return {}

    async def resume(self, _: dict[str, Any]) -> dict[str, Any]:
        """Go on. Raises PauseRefused."""
        self._training().end()
        return {}

    def _training(self) -> Pause:
        if self._peer.rounds is None:
            raise PauseRefused("this peer does not train yet; try again when it does")
        return self._peer.rounds.pause

    # --- admission --------------------------------------------------------------------------------
    async def invite(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """A new invitation, and where its holder can join."""
        parts, seed = self._peer.parts, self._entropy.token_bytes(SEED_BYTES)
        token = parts.door.invite(seed, float(wanted["lasts_s"]), int(wanted["uses"]))
        best = join_address(parts.network, parts.facts)
        return {"token": token.text, "address": best.address, "note": best.note}

    async def rule(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Rule on a peer, and tell all; which peer that was."""
        parts, verdict = self._peer.parts, Verdict(wanted["verdict"])
        peer_id, own_id = named_peer(wanted["peer"], self._known()), parts.facts.peer_id
        if verdict is Verdict.BAN and peer_id == own_id and parts.door.may_sign:
            raise LocoError("that is this peer itself; to end it: loco-peer leave")
        parts.links.passing_on.tell(parts.door.rule(verdict, peer_id))
        return {"peer": peer_id}

    def _known(self) -> frozenset[PeerId]:
        """Peers that were here, and those that were ruled on: one that is banned is not here."""
        parts = self._peer.parts
        members = {member.peer_id for member in parts.roster.members()}
        return frozenset(members | parts.door.known_peers | {parts.facts.peer_id})


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
    named = ", ".join(meant[:MAX_NAMED])
    raise LocoError(f"{len(meant)} peers have ids that end in {text}; give more of one: {named}")
