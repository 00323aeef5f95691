"""Where others reach a container, by what its provider has put into the environment.

Vast.ai and RunPod give a container one address outside, and its ports other numbers there. The
variables are written when it starts and may be out of date later, so what they say is a first
guess: an address at which others get through goes before it.

An *identity port* has one number inside and outside: it is asked for by a number that no port has,
and a variable says which it became.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from protocol.address.multiaddr import MAX_PORT

from .values import HostPort, Origin, parse_announce, whole

IDENTITY_PORT: Final = 70_000


@dataclass(frozen=True, slots=True)
class Provider:
    """The variable of the address, and how those begin that say a port's number outside."""

    origin: Origin
    host: str
    port: str

    def outer_port(self, environment: Mapping[str, str], port: int) -> int | None:
        text = environment.get(f"{self.port}{port}")
        return whole(1, MAX_PORT)(text) if text else None


PROVIDERS: Final = (
    Provider(Origin.VAST, "PUBLIC_IPADDR", "VAST_TCP_PORT_"),
    Provider(Origin.RUNPOD, "RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_"),
)
FIRST_GUESSES: Final = frozenset(provider.origin for provider in PROVIDERS)


@dataclass(frozen=True, slots=True)
class Mapped:
    """The port to listen on, and the multiaddr of it outside."""

    origin: Origin
    port: int
    announce: str


def mapped_by_provider(
    environment: Mapping[str, str], port: int, *, may_move: bool
) -> Mapped | None:
    """How others reach us, by the machine's provider; None where none says so.

    Args:
        port: that we would listen on.
        may_move: whether an identity port may take its place, where it is not mapped.

    Raises:
        ValueError: a variable is no address or port; says what to do.
    """
    for provider in PROVIDERS:
        try:
            outer, inner = provider.outer_port(environment, port), port
            if outer is None and may_move:
                outer = inner = provider.outer_port(environment, IDENTITY_PORT) or 0
            if outer and (host := environment.get(provider.host)):
                where = parse_announce(str(HostPort(host, outer)))
                return Mapped(provider.origin, inner, where)
        except ValueError as error:
            raise ValueError(
                f"{provider.host} and {provider.port}... ({provider.origin}): {error};"
                " or say where others reach this peer: --announce HOST:PORT"
            ) from error
    return None
