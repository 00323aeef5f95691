"""`loco-peer doctor`: looks at this machine, the network and a running peer; says what to do."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
import typer

from peer.network.reachability import Scope
from peer.observe.control import REPLY_TIMEOUT_S, ControlFailed, NoDaemon
from peer.observe.findings import Finding, Health, is_well, lines_of
from peer.options.addresses import HostPort
from peer.options.config import PeerConfig, load_config
from peer.options.exit_codes import ExitCode
from peer.state.home import Home
from protocol.address.multiaddr import split_peer_id
from protocol.errors import LocoError
from protocol.membership.dial_back import host_and_port

from .client import ask_daemon
from .doctor_machine import in_container, machine_findings
from .doctor_network import announced, docker_line, network_findings

if TYPE_CHECKING:
    from peer.daemon.examination import Examination, Visitor

DEFAULT_PORT: Final = 31337


def examine_here(
    home: Path | None, bootstrap: list[str] | None, listen: str | None, invite: str | None
) -> ExitCode:
    """Print what was found; 0 where nothing failed, else 1.

    Raises:
        LocoError: an option cannot be used.
    """
    given = {"home": home, "bootstrap": bootstrap, "listen": listen, "invite": invite}
    config = load_config(given, os.environ)
    findings = list(machine_findings(config.home))
    of = Home(config.home)
    status = trio.run(_status, of)
    if status is not None:
        findings += running_findings(status)
        port = of.kept_port("listen") or DEFAULT_PORT
        outer = _outer_address(status, config, port)
    else:
        port, seen = _look_outside(config, of, findings)
        outer = announced(config.announce, seen, port, in_container=in_container())
    for line in lines_of(findings):
        typer.echo(line)
    gpu = any(finding.subject == "GPU" and finding.health is Health.WELL for finding in findings)
    typer.echo(f"\nin a container:\n  {docker_line(port, config.bootstrap, outer, gpu=gpu)}")
    if outer is None:
        typer.echo(f"  (HOST: where others reach this machine, with {port}/tcp open to it)")
    return ExitCode.OK if is_well(findings) else ExitCode.FAILURE


def _outer_address(status: dict[str, Any], config: PeerConfig, port: int) -> str | None:
    """What a container in place of the running peer should announce."""
    shown = host_and_port(split_peer_id(status["address"])[0])
    seen = [*status["reach"]["observed"], *([] if shown is None else [shown[0]])]
    return announced(config.announce, seen, port, in_container=in_container())


async def _status(home: Home) -> dict[str, Any] | None:
    """What the daemon of this home says; None where none runs."""
    try:
        return await ask_daemon(home, "status", REPLY_TIMEOUT_S)
    except (NoDaemon, ControlFailed):
        return None


def running_findings(status: dict[str, Any]) -> Iterator[Finding]:
    """What a running peer knows of itself."""
    reach = status["reach"]
    peers = len(status["peers"])
    yield Finding(
        "daemon", Health.WELL, f"{status['state']}: {status['doing']}; other peers: {peers}"
    )
    only = status["reachable_from"]
    note = "" if only == Scope.ANYWHERE else f" (only reachable from {only})"
    yield Finding("address", Health.WELL, f"{status['address']}{note}")
    cure = "" if reach["reachable"] != "no" else "forward its port to avoid relays"
    health = Health.WELL if reach["reachable"] == "yes" else Health.NOTE
    families = f"IPv4 {reach['v4']}, IPv6 {reach['v6']}, by {reach['answers']} peers"
    yield Finding("dial-back", health, f"{reach['reachable']} ({families})", cure)
    yield Finding("router", Health.WELL, f"{reach['nat']}")
    if reach["reachable"] == "no" and not reach["relays"]:
        cure = "start one peer of the run on a machine with an open port"
        yield Finding("relay", Health.ILL, "no peer relays for this peer", cure)
    else:
        yield Finding("relay", Health.WELL, ", ".join(reach["relays"]) or "none is in use")


def _look_outside(
    config: PeerConfig, home: Home, findings: list[Finding]
) -> tuple[int, tuple[str, ...]]:
    """Examine the network as this home's peer would meet it; the port, and how others see us."""
    from peer.network.p2pd_process import CannotListen, P2pdFailed

    where = _listen(config, home)
    with _visiting(config, home, findings) as visitor:
        try:
            try:
                seen = _examine(config, where, visitor)
                says = f"{seen.port}/tcp is free here"
                findings.append(Finding("port", Health.WELL, says))
            except CannotListen as error:
                findings.append(Finding("port", Health.ILL, str(error)))
                seen = _examine(config, HostPort(_everywhere(where), 0), visitor)
        except P2pdFailed as error:
            findings.append(Finding("network", Health.ILL, str(error)))
            return where.port or DEFAULT_PORT, ()
    if config.bootstrap:
        findings += network_findings(seen)
    else:
        cure = "loco-peer doctor --bootstrap ADDR"
        findings.append(Finding("network", Health.NOTE, "not checked: no peer was named", cure))
    return where.port or seen.port, seen.observed


def _examine(config: PeerConfig, where: HostPort, visitor: "Visitor | None") -> "Examination":
    from peer.daemon.examination import examine  # here: it imports for a while
    from peer.network.directory import wall_time_s

    with tempfile.TemporaryDirectory(prefix="loco-doctor-") as folder:
        listen, place = where.multiaddr(), Path(folder)
        return trio.run(examine, config.bootstrap, listen, place, wall_time_s(), visitor)


def _listen(config: PeerConfig, home: Home) -> HostPort:
    """Where the peer would listen; port 0 is any that is free."""
    where, kept = config.listen, home.kept_port("listen")
    if where is None:
        return HostPort("0.0.0.0", kept or DEFAULT_PORT)  # noqa: S104 - peers come from anywhere
    return HostPort(where.host, where.port or kept or 0)


def _everywhere(where: HostPort) -> str:
    return "::" if ":" in where.host else "0.0.0.0"  # noqa: S104


@contextmanager
def _visiting(
    config: PeerConfig, home: Home, findings: list[Finding]
) -> "Iterator[Visitor | None]":
    """The peer of the home, where it has one or is given an invitation; None is a stranger."""
    from peer.daemon.examination import visitor_of

    if config.invite is None and not home.identity_path.exists():
        yield None
        return
    with ExitStack() as held:
        visitor = None
        try:
            home.prepare()
            held.enter_context(home.locked())
            visitor = visitor_of(home, config.invite)
        except LocoError as error:
            says = f"cannot be used now, so doctor asks with a new identity: {error}"
            findings.append(Finding("home", Health.NOTE, says))
        yield visitor
