"""`loco-peer doctor`: looks at this machine, the network and a running peer; says what to do."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import trio
import typer

from peer.observe.control import REPLY_TIMEOUT_S, ControlFailed, NoDaemon
from peer.observe.findings import Finding, Health, is_well, lines_of
from peer.options.config import PeerConfig, load_config
from peer.options.exit_codes import ExitCode
from peer.state.home import Home
from protocol.errors import LocoError

from .client import ask_daemon
from .doctor_machine import machine_findings
from .doctor_network import docker_line, network_findings

DEFAULT_PORT: Final = 31337


def examine_here(home: Path | None, bootstrap: list[str] | None, listen: str | None) -> ExitCode:
    """Print what was found; 0 where nothing failed, else 1.

    Raises:
        LocoError: an option cannot be used.
    """
    given = {"home": home, "bootstrap": bootstrap, "listen": listen}
    config = load_config(given, os.environ)
    findings = list(machine_findings(config.home))
    status = trio.run(_status, Home(config.home))
    if status is not None:
        findings += running_findings(status)
        kept = Home(config.home).kept_port("listen")
        observed = status["reach"]["observed"]
        port, outer, addresses = kept or DEFAULT_PORT, next(iter(observed), None), config.bootstrap
    else:
        port, outer, addresses = *_look_outside(config, findings), config.bootstrap
    for line in lines_of(findings):
        typer.echo(line)
    gpu = any(finding.subject == "GPU" and finding.health is Health.WELL for finding in findings)
    typer.echo(f"\nin a container:\n  {docker_line(port, addresses, outer, gpu=gpu)}")
    return ExitCode.OK if is_well(findings) else ExitCode.FAILURE


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
    cure = "" if reach["reachable"] != "no" else "forward its port, and it needs no relay"
    health = Health.WELL if reach["reachable"] == "yes" else Health.NOTE
    families = f"IPv4 {reach['v4']}, IPv6 {reach['v6']}, by {reach['answers']} peers"
    yield Finding("dial-back", health, f"{reach['reachable']} ({families})", cure)
    yield Finding("router", Health.WELL, f"{reach['nat']}")
    if reach["reachable"] == "no" and not reach["relays"]:
        cure = "start one peer of the run on a machine with an open port"
        yield Finding("relay", Health.ILL, "none relays for this peer", cure)
    else:
        yield Finding("relay", Health.WELL, ", ".join(reach["relays"]) or "none is in use")


def _look_outside(config: PeerConfig, findings: list[Finding]) -> tuple[int, str | None]:
    """Examine the network as this home's peer would meet it; the port, and our outer address."""
    from peer.daemon.examination import examine  # here: it imports for a while
    from peer.network.directory import wall_time_s

    host, port = "0.0.0.0", DEFAULT_PORT  # noqa: S104 - peers come from anywhere
    if config.listen is not None:
        host, port = config.listen.host, config.listen.port or DEFAULT_PORT
    kind = "ip6" if ":" in host else "ip4"
    with tempfile.TemporaryDirectory(prefix="loco-doctor-") as folder:
        listen = f"/{kind}/{host}/tcp/{port}"
        try:
            seen = trio.run(examine, config.bootstrap, listen, Path(folder), wall_time_s())
        except LocoError as error:
            findings.append(Finding("port", Health.ILL, str(error)))
            return port, None
    findings.append(Finding("port", Health.WELL, f"{port}/tcp is free here"))
    if config.bootstrap:
        findings += network_findings(seen)
    else:
        cure = "loco-peer doctor --bootstrap ADDR"
        findings.append(Finding("network", Health.NOTE, "not looked at: no peer was named", cure))
    return port, next(iter(seen.observed), None)
