"""`loco-peer doctor`: looks at this machine, the network and a running peer; says what to do."""

import hashlib
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import trio
import typer

from peer.daemon.checkpointing import free_bytes
from peer.daemon.examination import Examination, Met, Visitor, examine, visitor_of
from peer.network.directory import wall_time_s
from peer.network.p2pd import CannotListen, P2pdFailed, bundled_binary
from peer.network.reachability import Scope, scope_of
from peer.observe.control import ControlFailed, NoDaemon
from peer.observe.problems import CLOCK_OFFSET_S, NOTES
from peer.observe.status import reach_line
from peer.options.config import DEFAULT_PORT, PeerConfig
from peer.options.exit_codes import ExitCode
from peer.options.values import HostPort
from peer.process.bottom_line import shown
from peer.state.home import Home
from protocol.address.multiaddr import split_peer_id
from protocol.errors import LocoError
from protocol.limits import MAX_CLOCK_OFFSET_S
from protocol.membership.dial_back import NatKind, Reach, host_and_port
from protocol.names import size_text
from protocol.run.needs import DAEMON_BYTES, TRAINER_BYTES

from .client import ask_now


# --- findings -------------------------------------------------------------------------------------
class Health(StrEnum):
    WELL = "ok"
    NOTE = "note"
    """Works, with something to know."""
    ILL = "FAIL"


WELL, NOTE, ILL = Health.WELL, Health.NOTE, Health.ILL


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and what to do about it."""

    subject: str
    health: Health
    says: str
    cure: str = ""


def _judged(subject: str, good: bool, says: str, cure: str, bad: Health = ILL) -> Finding:
    return Finding(subject, WELL, says) if good else Finding(subject, bad, says, cure)


def lines_of(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.health:4}  {finding.subject:<10}  {finding.says}"
        if finding.cure:
            yield f"{'':16}  -> {finding.cure}"


def is_well(findings: Iterable[Finding]) -> bool:
    return all(finding.health is not ILL for finding in findings)


# --- this machine ---------------------------------------------------------------------------------
CONTAINER_MARKS: Final = (Path("/.dockerenv"), Path("/run/.containerenv"))
MIN_DISK_BYTES: Final = 5e9
SHOWN_PACKAGES: Final = ("loco-peer", "torch", "hivemind", "numpy")


def machine_findings(home: Path) -> Iterator[Finding]:
    import psutil
    import torch

    yield _versions()
    try:
        yield p2pd_finding(bundled_binary())
    except P2pdFailed as error:
        yield Finding("p2pd", ILL, str(error))
    yield disk_finding(home, free_bytes(home))
    free = psutil.virtual_memory().available
    cure = "end other programs; the daemon needs 8 bytes per parameter beside the trainer, and more"
    says = f"{size_text(free)} of memory free"
    yield _judged("memory", free >= DAEMON_BYTES + TRAINER_BYTES, says, cure)
    seen = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        seen.append(f"cuda:{index} {name}, {size_text(free)} of {size_text(total)} free")
    cure = "if it has a GPU: install its driver, and a torch that is built for CUDA"
    says = "; ".join(seen) or "torch finds none: it will train on the CPU"
    yield _judged("GPU", bool(seen), says, cure, NOTE)


P2PD_BUILDS: Final = {
    "42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8": (
        "go-libp2p 0.32.1, go-yamux 4.0.1, Go 1.20.11, of November 2023"
    ),
}
"""Builds of p2pd by their SHA-256. It is packed, so its own record cannot be read."""


def p2pd_finding(binary: Path) -> Finding:
    digest = hashlib.sha256(binary.read_bytes()).hexdigest()
    build = P2PD_BUILDS.get(digest, f"a build that is not known here (SHA-256 {digest[:16]}...)")
    return Finding("p2pd", WELL, f"{build}: {binary}")


def in_container() -> bool:
    """Whether files (Docker, Podman) or variables (Kubernetes) tell of one."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(map(Path.exists, CONTAINER_MARKS))


def _versions() -> Finding:
    found = [f"Python {platform.python_version()}"]
    for name in SHOWN_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            cure = "install it again: pip install -c constraints.txt ."
            return Finding("versions", ILL, f"{name} is not installed", cure)
    return Finding("versions", WELL, ", ".join(found))


def disk_finding(home: Path, free_bytes: float) -> Finding:
    says = f"{size_text(free_bytes)} free in {home}"
    cure = "free some, or choose another disk with --home; a state takes 8 bytes per parameter"
    return _judged("disk", free_bytes >= MIN_DISK_BYTES, says, cure)


# --- the network ----------------------------------------------------------------------------------
SLOW_BYTES_PER_S: Final = 1e6
ROUTERS: Final = {
    NatKind.NONE: "none: others see this machine's own address",
    NatKind.CONE: "one port for all destinations: direct connections are possible",
    NatKind.SYMMETRIC: "another port for each destination: unless forwarded, relays are needed",
    NatKind.UNKNOWN: "translates addresses; it takes two peers to tell its kind",
}


def network_findings(seen: Examination) -> Iterator[Finding]:
    """Findings in order of what the others depend on."""
    for met in seen.met:
        yield _peer(met)
    reached = [met for met in seen.met if met.failure is None]
    if not reached:
        return
    ahead = sorted(met.ahead_s for met in reached)[len(reached) // 2]
    says = f"theirs is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} ours"
    near, far = abs(ahead) <= CLOCK_OFFSET_S, abs(ahead) > MAX_CLOCK_OFFSET_S
    if not near:
        says += "; no peer is linked with so wrong a clock" if far else "; a joiner corrects for it"
    cure = "set the clock that is wrong: timedatectl set-ntp true"
    yield _judged("clock", near, says, cure, ILL if far else NOTE)
    yield _dial_back(seen)
    yield Finding("router", WELL, ROUTERS[seen.nat])
    relays = sum(bool(met.relays) for met in reached)
    if seen.reach is Reach.YES:
        yield Finding("relay", WELL, "none is needed")
    else:
        says = f"{relays} of {len(reached)} peers would relay" if relays else "no peer would relay"
        cure = "start one peer of the run on a machine with an open port, without --relay-mbps 0"
        bad = ILL if seen.reach is Reach.NO else NOTE
        yield _judged("relay", bool(relays), says, cure, bad)
    yield _bandwidth(reached)


def _peer(met: Met) -> Finding:
    if met.refused:
        return Finding("peer", ILL, f"{met.address} refuses this peer: {met.failure}")
    if met.failure is not None:
        cure = "ask its owner whether the address is right and the port open"
        return Finding("peer", ILL, f"{met.address}: {met.failure}", cure)
    says = f"{met.address} answers in {1e3 * met.round_trip_s:.0f} ms: {met.software}"
    return Finding("peer", WELL, says)


def _dial_back(seen: Examination) -> Finding:
    if seen.reach is Reach.YES:
        return Finding("dial-back", WELL, f"others can reach {seen.working[0]}")
    if seen.reach is Reach.UNKNOWN:
        cure = "ask a peer with a version that can: --bootstrap ADDR"
        return Finding("dial-back", NOTE, "no peer has tried to dial this machine", cure)
    outer = seen.observed[0] if seen.observed else "your public address"
    says = f"no peer can reach port {seen.port}/tcp at {outer}"
    cure = (
        f"forward {seen.port}/tcp to this machine, or open it in the firewall; otherwise peers"
        " reach it through relays only"
    )
    return Finding("dial-back", NOTE, says, cure)


def _bandwidth(reached: list[Met]) -> Finding:
    rates = [met.rate for met in reached if met.rate is not None]
    if not rates:
        return Finding("bandwidth", NOTE, "no peer had a piece of the corpus to measure it with")
    words = []
    for rate in rates:
        mbps = 8e-6 * rate.bytes_per_s
        words.append(f"{'at most ' * rate.at_most}{mbps:.{0 if mbps >= 10 else 1}f}")
    says = f"{', '.join(words)} Mbit/s, a piece of the corpus from each peer"
    fast = max(rate.bytes_per_s for rate in rates) >= SLOW_BYTES_PER_S
    cure = "expect skipped rounds with a large model: docs/running.md, Slow links"
    return _judged("bandwidth", fast, says, cure, NOTE)


def announced(
    given: Sequence[str], seen: Iterable[str], port: int, *, in_container: bool
) -> str | None:
    """The address that a container of this machine should announce; None if unknown here.

    Args:
        given: multiaddrs that the user announces.
        seen: IP addresses under which others see this machine.
        in_container: whether we ask from inside one: inner addresses are of no use then.
    """
    if given:
        return given[0]
    usable = (Scope.ANYWHERE,) if in_container else (Scope.ANYWHERE, Scope.NETWORK)
    addresses = (HostPort(host, port) for host in seen)
    return next((str(a) for a in addresses if scope_of(a.multiaddr()) in usable), None)


def docker_line(port: int, bootstrap: tuple[str, ...], outer: str | None, *, gpu: bool) -> str:
    """The command that runs this machine's peer in a container; `outer` as of `announced`."""
    words = ["docker run", *(["--gpus all"] if gpu else []), "-v loco:/data"]
    words += [f"-p {port}:{port}", "loco-peer join"]
    words += [f"--bootstrap {address}" for address in bootstrap or ("ADDR",)]
    words += [f"--listen 0.0.0.0:{port}"]
    words.append(f"--announce {outer or f'HOST:{port}'}")
    return " ".join(words)


# --- all of it ------------------------------------------------------------------------------------
def examine_here(config: PeerConfig) -> ExitCode:
    """Print what was found; 0 where nothing failed, else 1. Raises LocoError."""
    with shown("looking at this machine"):
        findings = list(machine_findings(config.home))
    of = Home(config.home)
    try:
        status = ask_now(of, "status")
    except (NoDaemon, ControlFailed):
        with shown("asking peers how this machine is reached"):
            port, seen = _look_outside(config, of, findings)
    else:
        findings += running_findings(status)
        port = of.kept_port("listen") or DEFAULT_PORT
        named = host_and_port(split_peer_id(status["address"])[0])
        seen = (*status["reach"]["observed"], *([] if named is None else [named[0]]))
    outer = announced(config.announce, seen, port, in_container=in_container())
    for line in lines_of(findings):
        typer.echo(line)
    gpu = any(finding.subject == "GPU" and finding.health is WELL for finding in findings)
    typer.echo(f"\nin a container:\n  {docker_line(port, config.bootstrap, outer, gpu=gpu)}")
    if outer is None:
        typer.echo(f"  (HOST: where others reach this machine, with {port}/tcp open to it)")
    return ExitCode.OK if is_well(findings) else ExitCode.FAILURE


def running_findings(status: dict[str, Any]) -> Iterator[Finding]:
    reach, peers = status["reach"], len(status["peers"])
    yield Finding("daemon", WELL, f"{status['state']}: {status['doing']}; other peers: {peers}")
    only, named_by = status["reachable_from"], status["address_from"]
    notes = [named_by, "" if only == Scope.ANYWHERE else f"only reachable from {only}"]
    note = "; ".join(filter(None, notes))
    yield Finding("address", WELL, f"{status['address']}{note and f' ({note})'}")
    undialable, relays = reach["reachable"] == "no", reach["relays"]
    cure = "forward its port" if relays else "start one peer of the run where a port is open"
    health = WELL if reach["reachable"] == "yes" else ILL if undialable and not relays else NOTE
    yield Finding("dial-back", health, reach_line(reach), cure if undialable else "")
    for problem in status["problems"]:
        health = NOTE if problem["name"] in NOTES else ILL
        yield Finding("wrong", health, problem["words"], f"docs/{problem['help']}")


def _look_outside(
    config: PeerConfig, home: Home, findings: list[Finding]
) -> tuple[int, tuple[str, ...]]:
    """Examine the network as this home's peer would meet it; the port, and how others see us."""
    where = _listen(config, home)
    if config.announce:
        says = f"others are told {' '.join(config.announce)} ({config.origins['announce']})"
        findings.append(Finding("address", WELL, says))
    with _visiting(config, home, findings) as visitor:
        try:
            try:
                seen = _examine(config, where, visitor)
                findings.append(Finding("port", WELL, f"{seen.port}/tcp is free here"))
            except CannotListen as error:
                findings.append(Finding("port", ILL, str(error)))
                everywhere = "::" if ":" in where.host else "0.0.0.0"  # noqa: S104
                seen = _examine(config, HostPort(everywhere, 0), visitor)
        except P2pdFailed as error:
            findings.append(Finding("network", ILL, str(error)))
            return where.port or DEFAULT_PORT, ()
    if config.bootstrap:
        findings += network_findings(seen)
    else:
        cure = "loco-peer doctor --bootstrap ADDR"
        findings.append(Finding("network", NOTE, "not checked: no peer was named", cure))
    return where.port or seen.port, seen.observed


def _examine(config: PeerConfig, where: HostPort, visitor: Visitor | None) -> Examination:
    with tempfile.TemporaryDirectory(prefix="loco-doctor-") as folder:
        listen, place = where.multiaddr(), Path(folder)
        return trio.run(examine, config.bootstrap, listen, place, wall_time_s(), visitor)


def _listen(config: PeerConfig, home: Home) -> HostPort:
    where, kept = config.listen, home.kept_port("listen")
    if where is None:
        return HostPort("0.0.0.0", kept or DEFAULT_PORT)  # noqa: S104 - peers come from anywhere
    return HostPort(where.host, where.port or kept or 0)


@contextmanager
def _visiting(config: PeerConfig, home: Home, findings: list[Finding]) -> Iterator[Visitor | None]:
    """The peer of the home, where it has one or is given an invitation; None is a stranger."""
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
            findings.append(Finding("home", NOTE, says))
        yield visitor
