"""What `loco-peer status`, `leave` and `export` ask of a daemon, at its control socket."""

from typing import Any

from peer.observe.control import Handler, NotNow

from .peer import Peer
from .report import Report


class PeerRequests:
    """What `loco-peer status`, `leave` and `export` may ask."""

    def __init__(self, peer: Peer, report: Report) -> None:
        self._peer = peer
        self._report = report

    def handlers(self) -> dict[str, Handler]:
        """The handler of each request, by its name."""
        return {
            "status": self.status,
            "leave": self.leave,
            "write_state": self.write_state,
            "fetch_stage": self.fetch_stage,
        }

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        """The current status."""
        return self._report.status().to_json()

    async def leave(self, _: dict[str, Any]) -> dict[str, Any]:
        """Begin to leave."""
        self._peer.request_stop()
        return {"grace_s": self._peer.grace_s}

    async def write_state(self, _: dict[str, Any]) -> dict[str, Any]:
        """Write the present state to a file. Raises NotNow: there is none yet."""
        service = self._peer.service
        written = None if service is None else await service.write()
        if written is None:
            raise NotNow("there is no state yet; try again when this peer is training")
        path, manifest = written
        scalars = manifest.scalars
        return {
            "path": str(path),
            "part": self._peer.part,
            "round": scalars.round,
            "tokens": scalars.tokens,
        }

    async def fetch_stage(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Write the slow weights of a stage that other peers hold to a file."""
        path = await self._peer.fetch_stage(wanted["stage"], wanted["padded_parameters"])
        return {"path": str(path)}
