"""The values of options, as a shell or TOML has them.

A function parses what was given, or makes the function that does; a ValueError says what would be
right.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from protocol.address import multiaddr
from protocol.address.multiaddr import HOST_PROTOCOLS, MAX_PORT, InvalidAddress
from protocol.limits import MAX_LINKS, MAX_SPEC_BYTES

if TYPE_CHECKING:
    from protocol.admission.statements import Token


class Origin(StrEnum):
    """Where a value came from; the first that has one wins."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    FILE = "file"
    VAST = "Vast.ai's environment"
    RUNPOD = "RunPod's environment"
    DEFAULT = "default"


class LogFormat(StrEnum):
    CONSOLE = "console"
    """One short line per important event, for people."""
    JSON = "json"
    """The event log's own lines."""


def flag(value: Any) -> bool:
    """Read yes or no, in the words of shells and TOML; nothing means no."""
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("use 'true' or 'false'")


def many(parse: Callable[[str], str]) -> Callable[[Any], tuple[str, ...]]:
    """Parse addresses, each once; spaces or commas separate them in one text."""

    def parse_all(value: Any) -> tuple[str, ...]:
        texts = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            raise ValueError("use a list of addresses")
        if len(texts) > MAX_LINKS:
            raise ValueError(f"at most {MAX_LINKS} addresses are allowed")
        return tuple(dict.fromkeys(parse(str(text)) for text in texts))

    return parse_all


def whole(lowest: int, highest: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        digits = str(value).strip().removeprefix("-")
        if isinstance(value, bool) or not digits.isdecimal():
            raise ValueError("use a whole number")
        if not lowest <= int(value) <= highest:
            raise ValueError(f"must be from {lowest} to {highest}")
        return int(value)

    return parse


def number(unit: str, lowest: float, highest: float, zero: bool = False) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        try:
            count = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"use a number of {unit}, without a unit") from None
        if isinstance(value, bool) or not (lowest <= count <= highest or (zero and count == 0)):
            raise ValueError(f"must be {'0, or ' * zero}from {lowest:g} to {highest:.0f} {unit}")
        return count

    return parse


def source(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("use a file of tokens, or a source as in data.source of the run spec")
    return value


def token(value: Any) -> "Token":
    """An invitation, or, behind an @, the file that holds it."""
    from protocol.admission.statements import BadToken, Token  # here: it imports cryptography

    try:
        return Token.parse(_secret(value))
    except BadToken as error:
        raise ValueError(str(error)) from error


def web_address(value: Any) -> str:
    """A URL, or, behind an @, the file that holds it."""
    text = _secret(value)
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    if not fits or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("use https://HOST/PATH, as the service shows it")
    return text


def page_token(value: Any) -> str:
    """A token that a header, a cookie and an address can hold, or, behind an @, its file."""
    text = _secret(value)
    if not re.fullmatch(r"[A-Za-z0-9_-]{16,256}", text):
        raise ValueError(
            "use 16 to 256 letters, digits, - and _, such as `openssl rand -hex 16` prints"
        )
    return text


def _secret(value: Any) -> str:
    """The text, or that of the file behind an @."""
    text = str(value)
    if not text.startswith("@"):
        return text
    try:
        with Path(text[1:]).open("rb") as file:
            return file.read(MAX_SPEC_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise ValueError(f"cannot read {text[1:]}: {error.strerror}") from error


def host_name(text: str) -> str:
    try:
        multiaddr.to_bytes(f"/dns/{text}")
    except InvalidAddress as error:
        raise ValueError("use a host name, without a port") from error
    return text.lower()


def device(value: Any) -> str:
    """Parse `cpu`, `cuda` or `cuda:N`. Whether it is here is looked at later."""
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", str(value)):
        raise ValueError("use 'cpu', 'cuda' or 'cuda:N'")
    return str(value)


def gpus(value: Any) -> str:
    """Parse `all`, a number of devices, or which. Whether they are here is looked at later."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if text == "all" or re.fullmatch("[1-9][0-9]{0,2}", text):
        return text
    numbers = text.split(",")
    if len(numbers) > 1 and all(re.fullmatch("[0-9]{1,3}", each) for each in numbers):
        if len(set(map(int, numbers))) == len(numbers):
            return text
        raise ValueError("name each GPU once")
    raise ValueError("use 'all', how many (from 1), or which ('0,2,3')")


TRACKERS: Final = ("trackio", "wandb", "tensorboard")


def tracker(text: str) -> str:
    if text not in TRACKERS:
        raise ValueError(f"use {' or '.join(map(repr, TRACKERS))}")
    return text


def log_format(value: Any) -> LogFormat:
    if value not in tuple(LogFormat):
        raise ValueError(f"use {' or '.join(repr(str(known)) for known in LogFormat)}")
    return LogFormat(value)


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host (name or IP address, v6 without brackets) and a TCP port; port 0 picks a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def multiaddr(self) -> str:
        try:
            protocol = f"ip{ipaddress.ip_address(self.host).version}"
        except ValueError:
            protocol = "dns"
        return f"/{protocol}/{self.host}/tcp/{self.port}"


def parse_host_port(value: Any) -> HostPort:
    """Read `HOST:PORT`, `[V6]:PORT`, `/ip4/HOST/tcp/PORT`, or `PORT` of every IPv4 interface."""
    text = str(value).strip()
    if text.startswith("/"):
        return _from_multiaddr(text)
    scheme, is_url, rest = text.partition("://")
    if is_url:
        bare = rest.partition("/")[0]
        raise ValueError(f"write HOST:PORT without {scheme}://, as {bare or 'HOST:PORT'}")
    host, colon, port = text.rpartition(":")
    if not colon:
        host = "0.0.0.0"
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"write an IPv6 address in brackets, as [{host}]:{port}")
    if not (colon or port.isdecimal()):
        raise ValueError(f"the port is missing: write HOST:PORT, as {text or 'HOST'}:31337")
    if not port.isdecimal() or int(port) > MAX_PORT:
        raise ValueError(f"the port must be a number from 0 to {MAX_PORT}")
    where = HostPort(host, int(port))
    try:
        multiaddr.to_bytes(where.multiaddr())
    except InvalidAddress as error:
        raise ValueError(
            "use HOST:PORT or a multiaddr such as /ip4/203.0.113.5/tcp/31337"
        ) from error
    return where


def _parts(text: str) -> list[tuple[str, str]]:
    try:
        return multiaddr.parse(multiaddr.normalise(text))
    except InvalidAddress as error:
        raise ValueError(str(error)) from error


def _from_multiaddr(text: str) -> HostPort:
    parts = _parts(text)
    names = [name for name, _ in parts]
    if len(names) < 2 or names[0] not in HOST_PROTOCOLS or names[1] != "tcp":
        raise ValueError("use a multiaddr such as /ip4/203.0.113.5/tcp/31337")
    if names[2:] not in ([], ["p2p"]):
        raise ValueError("after /tcp/PORT only /p2p/PEER_ID may follow")
    return HostPort(parts[0][1], int(parts[1][1]))


def parse_bootstrap(text: str) -> str:
    """Check `HOST:PORT`, or a multiaddr with or without a peer id.

    A relayed address (`/p2p-circuit`) names the relay and the peer.
    """
    text = text.strip()
    if text.startswith("/") and ("p2p-circuit", "") in (parts := _parts(text)):
        if parts[-1][0] != "p2p":
            raise ValueError("after /p2p-circuit the peer must follow, as /p2p/PEER_ID")
        return text
    if not (":" in text or text.startswith("/")) or parse_host_port(text).port == 0:
        raise ValueError(
            "give a host and the port that the peer listens on, as HOST:PORT or a multiaddr"
        )
    return text


def parse_announce(text: str) -> str:
    """The multiaddr, without a peer id; an address that nobody can dial is refused."""
    where = parse_host_port(text)
    if where.port == 0:
        raise ValueError("port 0 cannot be announced: nobody can dial it")
    if where.host in ("0.0.0.0", "::"):
        raise ValueError(
            f"{where.host} cannot be announced: give the address that others reach you by"
        )
    return where.multiaddr()


class Cloud(StrEnum):
    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


@dataclass(frozen=True, slots=True)
class Notices:
    """A cloud, and where its metadata service answers."""

    cloud: Cloud
    where: HostPort

    def __str__(self) -> str:
        return str(self.cloud) if self.where == METADATA else f"{self.cloud}@{self.where}"


METADATA: Final = HostPort("169.254.169.254", 80)
"""AWS, GCP and Azure answer at the same one."""


def notices(value: Any) -> Notices:
    name, _, where = str(value).partition("@")
    if name not in tuple(Cloud):
        known = " or ".join(repr(str(cloud)) for cloud in Cloud)
        raise ValueError(f"use {known}, and @HOST:PORT if its metadata service is elsewhere")
    return Notices(Cloud(name), parse_host_port(where) if where else METADATA)


# For a service called `loco-peer`, Kubernetes sets `LOCO_PEER_SERVICE_HOST`,
# `LOCO_PEER_PORT=tcp://...` and more in every pod beside it. They are no settings of ours.
_NAMES: Final = re.compile(
    r"\w+_SERVICE_HOST|\w+_SERVICE_PORT(_\w+)?|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)
_PORT_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    link = name.endswith("_PORT") and _PORT_VALUE.match(value)
    return bool(link or _NAMES.fullmatch(name))
