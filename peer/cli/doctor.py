"""`loco-peer doctor`: looks at this machine, the network and a running peer; says what to do."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
import typer

from peer.daemon.examination import Examination, LineRate, Met
from peer.network.reachability import Scope, scope_of
from peer.observe.control import REPLY_TIMEOUT_S, ControlFailed, NoDaemon
from peer.observe.findings import Finding, Health, is_well, lines_of
from peer.options.config import PeerConfig, load_config
from peer.options.exit_codes import ExitCode
from peer.options.values import HostPort
from peer.state.home import Home
from protocol.address.multiaddr import split_peer_id
from protocol.errors import LocoError
from protocol.membership.dial_back import NatKind, Reach, host_and_port
from protocol.names import size_text

from .client import ask_daemon

if TYPE_CHECKING:
    from peer.daemon.examination import Examination, Visitor


# --- doctor machine -------------------------------------------------------------------------------
CONTAINER_MARKS: Final = (Path("/.dockerenv"), Path("/run/.containerenv"))
MIN_DISK_BYTES: Final = 5e9
MIN_MEMORY_BYTES: Final = 2e9
SHOWN_PACKAGES: Final = ("loco-peer", "torch", "hivemind", "numpy")


def machine_findings(home: Path) -> Iterator[Finding]:
    """Versions, p2pd, disk, memory, GPU."""
    yield _versions()
    yield _p2pd()
    yield disk_finding(home, shutil.disk_usage(_existing(home)).free)
    yield _memory()
    yield _gpu()


def in_container() -> bool:
    """Whether we run in one, as its files (Docker, Podman) or its variables (Kubernetes) say."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(map(Path.exists, CONTAINER_MARKS))


def _versions() -> Finding:
    found = [f"Python {platform.python_version()}"]
    for name in SHOWN_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            cure = "install it again: pip install -c constraints.txt ."
            return Finding("versions", Health.ILL, f"{name} is not installed", cure)
    return Finding("versions", Health.WELL, ", ".join(found))


def _p2pd() -> Finding:
    from peer.network.p2pd_process import P2pdFailed, bundled_binary

    try:
        return Finding("p2pd", Health.WELL, str(bundled_binary()))
    except P2pdFailed as error:
        return Finding("p2pd", Health.ILL, str(error))


def disk_finding(home: Path, free_bytes: float) -> Finding:
    """Whether the home has room for a corpus and a state."""
    says = f"{size_text(free_bytes)} free in {home}"
    if free_bytes >= MIN_DISK_BYTES:
        return Finding("disk", Health.WELL, says)
    cure = "free some, or choose another disk with --home; a state takes 8 bytes per parameter"
    return Finding("disk", Health.ILL, says, cure)


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    says = f"{size_text(free)} of memory free"
    if free >= MIN_MEMORY_BYTES:
        return Finding("memory", Health.WELL, says)
    cure = "end other programs; the daemon needs 8 bytes per parameter beside the trainer, and more"
    return Finding("memory", Health.ILL, says, cure)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        cure = "if it has a GPU: install its driver, and a torch that is built for CUDA"
        return Finding("GPU", Health.NOTE, "torch finds none: it will train on the CPU", cure)
    seen = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        seen.append(f"cuda:{index} {name}, {size_text(free)} of {size_text(total)} free")
    return Finding("GPU", Health.WELL, "; ".join(seen))


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


# --- doctor network -------------------------------------------------------------------------------
MAX_CLOCK_OFFSET_S = 2.0
"""p2pd's directory allows 3 s."""
SLOW_BYTES_PER_S = 1e6


def network_findings(seen: Examination) -> Iterator[Finding]:
    """Everything that was seen, in order of what others depend on."""
    for met in seen.met:
        yield _peer(met)
    reached = [met for met in seen.met if met.failure is None]
    if not reached:
        return
    yield _clock(reached)
    yield _dial_back(seen)
    yield _router(seen)
    yield _relay(seen, reached)
    yield _bandwidth(reached)


def _peer(met: Met) -> Finding:
    if met.refused:
        return Finding("peer", Health.ILL, f"{met.address} refuses this peer: {met.failure}")
    if met.failure is not None:
        return Finding(
            "peer",
            Health.ILL,
            f"{met.address}: {met.failure}",
            "ask its owner whether the address is right and the port open",
        )
    says = f"{met.address} answers in {1e3 * met.round_trip_s:.0f} ms: {met.software}"
    return Finding("peer", Health.WELL, says)


def _clock(reached: list[Met]) -> Finding:
    ahead = sorted(met.ahead_s for met in reached)[len(reached) // 2]
    says = f"theirs is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} ours"
    if abs(ahead) <= MAX_CLOCK_OFFSET_S:
        return Finding("clock", Health.WELL, says)
    return Finding(
        "clock",
        Health.NOTE,
        says + "; a peer corrects for it when it joins",
        "set the clock: timedatectl set-ntp true",
    )


def _dial_back(seen: Examination) -> Finding:
    if seen.reach is Reach.YES:
        return Finding("dial-back", Health.WELL, f"others can reach {seen.working[0]}")
    if seen.reach is Reach.UNKNOWN:
        return Finding(
            "dial-back",
            Health.NOTE,
            "no peer has tried to dial this machine",
            "ask a peer with a version that can: --bootstrap ADDR",
        )
    outer = seen.observed[0] if seen.observed else "your public address"
    return Finding(
        "dial-back",
        Health.NOTE,
        f"no peer can reach port {seen.port}/tcp at {outer}",
        f"forward {seen.port}/tcp to this machine, or open it in the firewall; otherwise peers"
        " reach it through relays only",
    )


def _router(seen: Examination) -> Finding:
    says = {
        NatKind.NONE: "none: others see this machine's own address",
        NatKind.CONE: "one port for all destinations: direct connections are possible",
        NatKind.SYMMETRIC: "another port for each destination: unless forwarded, relays are needed",
        NatKind.UNKNOWN: "translates addresses; it takes two peers to tell its kind",
    }[seen.nat]
    return Finding("router", Health.WELL, says)


def _relay(seen: Examination, reached: list[Met]) -> Finding:
    relays = [met for met in reached if met.relays]
    if seen.reach is Reach.YES:
        return Finding("relay", Health.WELL, "none is needed")
    if relays:
        return Finding("relay", Health.WELL, f"{len(relays)} of {len(reached)} peers would relay")
    return Finding(
        "relay",
        Health.ILL if seen.reach is Reach.NO else Health.NOTE,
        "no peer would relay",
        "start one peer of the run on a machine with an open port, without --relay-mbps 0",
    )


def _bandwidth(reached: list[Met]) -> Finding:
    rates = [met.rate for met in reached if met.rate is not None]
    if not rates:
        return Finding(
            "bandwidth", Health.NOTE, "no peer had a piece of the corpus to measure it with"
        )
    slow = max(rate.bytes_per_s for rate in rates) < SLOW_BYTES_PER_S
    says = [_in_words(rate) for rate in rates]
    return Finding(
        "bandwidth",
        Health.NOTE if slow else Health.WELL,
        f"{', '.join(says)} Mbit/s, a piece of the corpus from each peer",
        "expect skipped rounds with a large model: docs/running.md, Slow links" if slow else "",
    )


def _in_words(rate: LineRate) -> str:
    """Megabits per second."""
    mbps = 8e-6 * rate.bytes_per_s
    return f"{'at most ' * rate.at_most}{mbps:.{0 if mbps >= 10 else 1}f}"


def announced(
    given: Sequence[str], seen: Iterable[str], port: int, *, in_container: bool
) -> str | None:
    """What a container of this machine should announce; None where it cannot be told from here.

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
    """The exact line that runs this machine's peer in a container; `outer` as of `announced`."""
    words = ["docker run", *(["--gpus all"] if gpu else []), "-v loco:/data"]
    words += [f"-p {port}:{port}", "loco-peer join"]
    words += [f"--bootstrap {address}" for address in bootstrap or ("ADDR",)]
    words += [f"--listen 0.0.0.0:{port}"]
    words.append(f"--announce {outer or f'HOST:{port}'}")
    return " ".join(words)


# --- doctor ---------------------------------------------------------------------------------------
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
