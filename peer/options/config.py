"""One peer's configuration: what is particular to this machine, and where each value came from.

Command line over environment (`LOCO_...`) over file (`peer.toml` in the home) over default. Every
option has one name in three spellings: `--log-format`, `LOCO_LOG_FORMAT`, `log_format = ...`. What
nobody knows is refused, with the nearest valid name, before anything starts: a misspelt setting
that is silently ignored costs its owner a night.

What all peers of a run must agree on is not here but in the run spec (protocol/run/run_spec.py).
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protocol.errors import LocoError
from protocol.run.pipeline_section import MAX_STAGES

from .addresses import HostPort, parse_announce, parse_bootstrap, parse_host_port
from .service_links import is_service_link

if TYPE_CHECKING:
    from protocol.admission.invitations import Token

DEFAULT_GRACE_S: Final = 8.0
MAX_GRACE_S: Final = 3600.0
DEFAULT_CHECKPOINT_EVERY_S: Final = 600.0
MAX_CHECKPOINT_EVERY_S: Final = 7 * 86400.0
DEFAULT_CHECKPOINTS: Final = 3
MAX_CHECKPOINTS: Final = 1000
MAX_THREADS: Final = 4096
MIN_MBPS: Final = 1.0
MAX_MBPS: Final = 1e6
DEFAULT_RELAY_MBPS: Final = 100.0
MIN_DISK_GB: Final = 0.1
MAX_DISK_GB: Final = 1e6
MAX_OVERLAP_STEPS: Final = 1000
MAX_BOOTSTRAP_ADDRESSES: Final = 64
MAX_CONFIG_FILE_BYTES: Final = 64 * 1024
ENVIRONMENT_PREFIX: Final = "LOCO_"


class ConfigError(LocoError):
    """This machine's configuration cannot be used; the message says what to change."""


class Origin(StrEnum):
    """Where a value came from; the first that has one wins."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


class LogFormat(StrEnum):
    """What goes to stderr."""

    CONSOLE = "console"
    """One short line per important event, for people."""
    JSON = "json"
    """The event log's own lines."""


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Attributes are the options; see `OPTIONS` for what each means.

    Attributes:
        origins: option name to the place its value came from.
    """

    home: Path
    bootstrap: tuple[str, ...]
    invite: "Token | None"
    listen: HostPort | None
    announce: tuple[str, ...]
    metrics: HostPort
    device: str | None
    threads: int | None
    overlap_steps: int | None
    stage: int | None
    checkpoint_activations: bool
    checkpoint_every_s: float
    checkpoint_keep: int
    checkpoint_max_gb: float | None
    checkpoint_upload: str | None
    upload_keys: bool
    log_format: LogFormat
    verbose: bool
    grace_s: float
    data: str | None
    max_corpus_gb: float | None
    max_upload_mbps: float | None
    max_download_mbps: float | None
    relay_mbps: float
    quic: bool
    exit_when_done: bool
    alone: bool
    export_when_done: Path | None
    json_ready: bool
    origins: Mapping[str, Origin]

    def describe(self) -> list[str]:
        """One line per option: name, value and which place won."""
        shown = {option.name: _shown(getattr(self, option.attribute)) for option in OPTIONS}
        shown |= {name: "(given)" for name in SECRETS if shown[name] != NOT_GIVEN}
        return [f"{name} = {value} ({self.origins[name]})" for name, value in shown.items()]


NOT_GIVEN: Final = "-"


def _shown(value: Any) -> str:
    match value:
        case None | ():
            return NOT_GIVEN
        case tuple():
            return " ".join(str(part) for part in value)
        case bool():
            return "true" if value else "false"
        case _:
            return str(value)


# --- values ---------------------------------------------------------------------------------------


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False}
    words |= {"no": False, "off": False, "": False}
    if str(value).strip().lower() not in words:
        raise ValueError("use 'true' or 'false'")
    return words[str(value).strip().lower()]


def _many(parse: Callable[[str], str]) -> Callable[[Any], tuple[str, ...]]:
    def parse_all(value: Any) -> tuple[str, ...]:
        texts = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            raise ValueError("use a list of addresses")
        if len(texts) > MAX_BOOTSTRAP_ADDRESSES:
            raise ValueError(f"at most {MAX_BOOTSTRAP_ADDRESSES} addresses are allowed")
        return tuple(dict.fromkeys(parse(str(text)) for text in texts))

    return parse_all


def _whole(lowest: int, highest: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        digits = str(value).strip().removeprefix("-")
        if isinstance(value, bool) or not digits.isdecimal():
            raise ValueError("use a whole number")
        if not lowest <= int(value) <= highest:
            raise ValueError(f"must be from {lowest} to {highest}")
        return int(value)

    return parse


def _seconds(highest: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            raise ValueError("use a number of seconds") from None
        if not 0 <= seconds <= highest:
            raise ValueError(f"must be from 0 to {highest:.0f} seconds")
        return seconds

    return parse


def _gigabytes(value: Any) -> float:
    try:
        gigabytes = float(value)
    except (TypeError, ValueError):
        raise ValueError("use a number of gigabytes, without a unit") from None
    if isinstance(value, bool) or not MIN_DISK_GB <= gigabytes <= MAX_DISK_GB:
        raise ValueError(
            f"must be from {MIN_DISK_GB} to {MAX_DISK_GB:.0f} gigabytes; leave it out for no limit"
        )
    return gigabytes


def _mbps(value: Any) -> float:
    try:
        mbps = float(value)
    except (TypeError, ValueError):
        raise ValueError("use a number of megabits per second, without a unit") from None
    if isinstance(value, bool) or not MIN_MBPS <= mbps <= MAX_MBPS:
        raise ValueError(
            f"must be from {MIN_MBPS:.0f} to {MAX_MBPS:.0f} megabits per second; leave it out for"
            " no limit"
        )
    return mbps


def _relay_mbps(value: Any) -> float:
    return 0.0 if str(value) in ("0", "0.0") else _mbps(value)


def _source(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("use a file of tokens, or a source as in data.source of the run spec")
    return value


def _token(value: Any) -> "Token":
    from protocol.admission.invitations import BadToken, Token  # here: it imports cryptography

    try:
        return Token.parse(str(value))
    except BadToken as error:
        raise ValueError(str(error)) from error


def _device(value: Any) -> str:
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", str(value)):
        raise ValueError("use 'cpu', 'cuda' or 'cuda:N'")
    return str(value)


def _log_format(value: Any) -> LogFormat:
    if value not in tuple(LogFormat):
        raise ValueError(f"use {' or '.join(repr(str(known)) for known in LogFormat)}")
    return LogFormat(value)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a peer.

    Attributes:
        name: as on the command line, without the dashes.
        parse: turns text, or a TOML value, into the value; ValueError says what would be right.
        attribute: field of `PeerConfig`.
    """

    name: str
    parse: Callable[[Any], Any]
    default: Any
    attribute: str

    @property
    def environment_name(self) -> str:
        """`LOCO_LOG_FORMAT` for `log-format`."""
        return ENVIRONMENT_PREFIX + self.name.upper().replace("-", "_")

    @property
    def key(self) -> str:
        """Name in `peer.toml`."""
        return self.name.replace("-", "_")


OPTIONS: Final = (
    Option("home", Path, None, "home"),
    Option("bootstrap", _many(parse_bootstrap), (), "bootstrap"),
    Option("invite", _token, None, "invite"),
    Option("listen", parse_host_port, None, "listen"),
    Option("announce", _many(parse_announce), (), "announce"),
    Option("metrics", parse_host_port, HostPort("127.0.0.1", 0), "metrics"),
    Option("device", _device, None, "device"),
    Option("threads", _whole(1, MAX_THREADS), None, "threads"),
    Option("overlap-steps", _whole(0, MAX_OVERLAP_STEPS), None, "overlap_steps"),
    Option("stage", _whole(0, MAX_STAGES - 1), None, "stage"),
    Option("checkpoint-activations", _flag, False, "checkpoint_activations"),
    Option(
        "checkpoint-every",
        _seconds(MAX_CHECKPOINT_EVERY_S),
        DEFAULT_CHECKPOINT_EVERY_S,
        "checkpoint_every_s",
    ),
    Option("checkpoint-keep", _whole(1, MAX_CHECKPOINTS), DEFAULT_CHECKPOINTS, "checkpoint_keep"),
    Option("checkpoint-max-gb", _gigabytes, None, "checkpoint_max_gb"),
    Option("checkpoint-upload", str, None, "checkpoint_upload"),
    Option("upload-keys", _flag, False, "upload_keys"),
    Option("log-format", _log_format, LogFormat.CONSOLE, "log_format"),
    Option("verbose", _flag, False, "verbose"),
    Option("data", _source, None, "data"),
    Option("max-corpus-gb", _gigabytes, None, "max_corpus_gb"),
    Option("grace", _seconds(MAX_GRACE_S), DEFAULT_GRACE_S, "grace_s"),
    Option("max-upload-mbps", _mbps, None, "max_upload_mbps"),
    Option("max-download-mbps", _mbps, None, "max_download_mbps"),
    Option("relay-mbps", _relay_mbps, DEFAULT_RELAY_MBPS, "relay_mbps"),
    Option("quic", _flag, False, "quic"),
    Option("exit-when-done", _flag, False, "exit_when_done"),
    Option("alone", _flag, False, "alone"),
    Option("export-when-done", Path, None, "export_when_done"),
    Option("json-ready", _flag, False, "json_ready"),
)
"""Every option of `start` and `join`, home first."""
SECRETS: Final = frozenset({"invite"})
"""Options whose values are shown to nobody."""


# --- which place wins -----------------------------------------------------------------------------


def default_home() -> Path:
    """The platform's user data directory for loco-peer."""
    import platformdirs  # here, because `--help` does not need it

    return Path(platformdirs.user_data_dir("loco-peer", appauthor=False))


def resolve_home(command_line: Path | None, environment: Mapping[str, str]) -> Path:
    """The home alone, for commands that need no other option."""
    check_environment(environment)
    return Path(command_line or environment.get("LOCO_HOME") or default_home()).absolute()


def load_config(command_line: Mapping[str, Any], environment: Mapping[str, str]) -> PeerConfig:
    """Put the four places together.

    Args:
        command_line: option name (`log-format`) to value; None and empty lists mean not given.
        environment: all of it; what does not begin with `LOCO_` is ignored.

    Raises:
        ConfigError: an unknown name, or a value that cannot be used; says what would be right.
    """
    home = resolve_home(command_line.get("home"), environment)
    in_file = _read_file(home / "peer.toml")
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for option in OPTIONS:
        origin, raw, where = _winner(option, command_line, environment, in_file)
        values[option.attribute] = (
            option.default if origin is Origin.DEFAULT else _parsed(option, raw, where)
        )
        origins[option.name] = origin
    values["home"] = home
    return PeerConfig(**values, origins=origins)


def _winner(
    option: Option,
    command_line: Mapping[str, Any],
    environment: Mapping[str, str],
    in_file: Mapping[str, Any],
) -> tuple[Origin, Any, str]:
    given = command_line.get(option.name)
    if given not in (None, [], ()):
        return Origin.COMMAND_LINE, given, f"--{option.name}"
    if environment.get(option.environment_name):
        return Origin.ENVIRONMENT, environment[option.environment_name], option.environment_name
    if option.key in in_file:
        return Origin.FILE, in_file[option.key], f"{option.key} in peer.toml"
    return Origin.DEFAULT, None, ""


def _parsed(option: Option, raw: Any, where: str) -> Any:
    try:
        return option.parse(raw)
    except (ValueError, TypeError) as error:
        got = "" if option.name in SECRETS else f" (got {raw!r})"
        raise ConfigError(f"{where}: {error}{got}") from error


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse a `LOCO_...` variable that nobody reads. Raises ConfigError."""
    known = [option.environment_name for option in OPTIONS]
    for name, value in sorted(environment.items()):
        ours = name.startswith(ENVIRONMENT_PREFIX) and name not in known
        if ours and not is_service_link(name, value):
            raise ConfigError(f"unknown environment variable {name}{_hint(name, known)}")


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(text) > MAX_CONFIG_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_CONFIG_FILE_BYTES} bytes")
    try:
        tree = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    known = [option.key for option in OPTIONS if option.name != "home"]
    for key in tree:
        if key not in known:
            raise ConfigError(f"unknown key '{key}' in {path}{_hint(key, known)}")
    return tree


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
