"""What an examination of the network means for a user: findings, with what to do about each."""

from collections.abc import Iterable, Iterator, Sequence

from peer.daemon.examination import Examination, LineRate, Met
from peer.network.reachability import Scope, scope_of
from peer.observe.findings import Finding, Health
from peer.options.addresses import HostPort
from protocol.membership.dial_back import NatKind, Reach

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
