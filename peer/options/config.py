"""One peer's configuration: what is particular to this machine, and where each value came from.

Command line over environment (`LOCO_...`) over file (`peer.toml` in the home) over default, and in
place of the default `--announce`, what a cloud's environment says (providers.py). A field of
`PeerConfig` declares an option: its name in three spellings (`--log-format`, `LOCO_LOG_FORMAT`,
`log_format = ...`), what it takes, its default, and the words of `--help` and docs/running.md. An
unknown name is refused, with the nearest valid one: a misspelt setting that is silently ignored
costs its owner a night.
"""

# ruff: noqa: RUF009 - `_option` makes a field, as dataclasses.field does

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protocol.errors import InvalidRunSpec, Unusable
from protocol.limits import MAX_SPEC_BYTES, MAX_STAGES
from protocol.names import nearest

from . import values
from .providers import mapped_by_provider
from .values import (
    HostPort,
    LogFormat,
    Notices,
    Origin,
    flag,
    is_service_link,
    many,
    number,
    parse_announce,
    parse_bootstrap,
    parse_host_port,
    whole,
)

if TYPE_CHECKING:
    from protocol.admission.statements import Token
    from protocol.run.run_spec import RunSpec

DEFAULT_PORT: Final = 31337
ENVIRONMENT_PREFIX: Final = "LOCO_"


class ConfigError(Unusable):
    """The message says what to change."""


class OptionGroup(StrEnum):
    RUN = "Run"
    MACHINE = "This machine"
    NETWORK = "Network"
    DISK = "Disk"
    WATCHING = "Watching and ending"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a peer.

    Attributes:
        parse: turns text, or a TOML value, into the value; ValueError says what would be right.
        metavar: stands for its value in `--help`.
        letter: its short name, such as `-v`.
        founder: whether `start` takes it, too.
        attribute: field of `PeerConfig`; a unit may end it, which its names do not have.
    """

    group: OptionGroup
    parse: Callable[[Any], Any]
    metavar: str
    help: str
    default: Any = None
    letter: str = ""
    founder: bool = True
    attribute: str = ""

    @property
    def key(self) -> str:
        """Name in `peer.toml`, and in code."""
        return self.attribute.removesuffix("_s")

    @property
    def name(self) -> str:
        return self.key.replace("_", "-")

    @property
    def environment_name(self) -> str:
        return ENVIRONMENT_PREFIX + self.key.upper()

    @property
    def kind(self) -> Any:
        """The type for typer; None is not given on the command line."""
        if self.parse is flag:
            return bool | None
        return list[str] | None if self.default == () else str | None

    @property
    def help_with_default(self) -> str:
        if self.default in (None, (), False):
            return self.help
        default = f"{self.default:g}" if isinstance(self.default, float) else self.default
        return f"{self.help} Default: {default}."


def _option(
    group: OptionGroup, parse: Callable[[Any], Any], metavar: str, help: str, **more: Any
) -> Any:
    return dataclasses.field(metadata={"option": Option(group, parse, metavar, help, **more)})


def _flag(group: OptionGroup, help: str, **more: Any) -> Any:
    return _option(group, flag, "", help, default=False, **more)


_run, _machine, _network, _disk, _watching = (partial(_option, group) for group in OptionGroup)
_gigabytes: Final = number("gigabytes", 0.1, 1e6)
_mbps: Final = number("megabits per second", 1, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """The options of `start` and `join`, and by name where each value came from."""

    home: Path = _run(
        Path,
        "DIR",
        "Holds identity, state and logs; one run per home. Default: the user data directory.",
    )
    bootstrap: tuple[str, ...] = _run(
        many(parse_bootstrap),
        "ADDR",
        "A peer to join through: HOST:PORT or a multiaddr. May be repeated.",
        default=(),
        founder=False,
    )
    invite: "Token | None" = _run(
        values.token,
        "@FILE",
        "The file that holds an invitation. Or set it in LOCO_INVITE: process lists show options.",
        founder=False,
    )
    yes: bool = _flag(
        OptionGroup.RUN,
        "Join without being asked, however much of this machine the run takes.",
        founder=False,
    )
    alone: bool = _flag(
        OptionGroup.RUN, "Continue the home's run at once, even if no known peer can be reached."
    )
    stage: int | None = _run(
        whole(0, MAX_STAGES - 1),
        "N",
        "Hold this stage of a pipeline, counted from 0. Default: the one that needs a peer most.",
        founder=False,
    )
    expert: str | None = _run(
        str,
        "NAME",
        "Train this expert and no other, where the run has any. Default: the one that needs a peer"
        " most, of a founder the first.",
    )
    data: str | None = _run(
        values.source,
        "PATH",
        "Take the corpus from this file or source. Default: from the other peers.",
    )
    follow: bool = _flag(
        OptionGroup.RUN,
        "When the run is over, join the one in which its founder goes on with the model.",
    )
    exit_when_done: bool = _flag(
        OptionGroup.RUN, "Exit at the end of the run instead of serving its state."
    )
    export_when_done: Path | None = _run(
        Path, "DIR", "Write the model to DIR at the end of the run, as `export` does."
    )

    device: str | None = _machine(
        values.device, "DEVICE", "cpu, cuda or cuda:N. Default: a GPU if there is one."
    )
    gpus: str | None = _machine(
        values.gpus,
        "all|N|0,2,3",
        "Train on several GPUs of this machine, as one peer. With --device cpu, in N processes.",
    )
    split_context: bool = _flag(
        OptionGroup.MACHINE,
        "Divide each sequence between these GPUs, and not the batch: for sequences too long for"
        " one.",
    )
    threads: int | None = _machine(whole(1, 4096), "N", "CPU threads of the trainer. Default: all.")
    checkpoint_activations: bool = _flag(
        OptionGroup.MACHINE,
        "Save memory: recompute activations in the backward pass. Default: where the memory is too"
        " small for one sequence, or on a GPU for two at once.",
    )
    shard_weights: bool = _flag(
        OptionGroup.MACHINE,
        "Save memory: keep on each of several GPUs a part of the weights alone. Default: where all"
        " weights do not fit.",
    )
    overlap_steps: int | None = _machine(
        whole(0, 1000),
        "N",
        "Steps to train while a fragment travels. Default: the run's (DiLoCo only).",
    )

    listen: HostPort | None = _network(
        parse_host_port,
        "[HOST:]PORT",
        "Address to listen on. Default: 31337, else a free port, kept for the next start.",
    )
    announce: tuple[str, ...] = _network(
        many(parse_announce),
        "ADDR",
        "The address that others reach this peer at, if it differs. May be repeated.",
        default=(),
    )
    max_upload_mbps: float | None = _network(
        _mbps, "MBPS", "Upload limit in megabits per second. Default: no limit."
    )
    max_download_mbps: float | None = _network(
        _mbps, "MBPS", "Download limit in megabits per second. Default: no limit."
    )
    relay_mbps: float = _network(
        number("megabits per second", 1, 1e6, zero=True),
        "MBPS",
        "Rate limit for relaying to peers that nobody can dial; 0 turns relaying off.",
        default=100.0,
    )

    checkpoint_every_s: float = _disk(
        number("seconds", 0, 7 * 86400),
        "SECONDS",
        "Time between checkpoints; 0 writes one only when the peer ends.",
        default=600.0,
    )
    checkpoint_keep: int = _disk(whole(1, 1000), "N", "Number of checkpoints to keep.", default=3)
    checkpoint_max_gb: float | None = _disk(
        _gigabytes,
        "GB",
        "Keep fewer checkpoints if they would take more than this. Default: no limit.",
    )
    checkpoint_upload: str | None = _disk(
        str,
        "URL",
        "Copy checkpoints to this folder or fsspec URL (such as s3://bucket/run) too, with all"
        " that --restore needs except keys.",
    )
    upload_keys: bool = _flag(
        OptionGroup.DISK,
        "Upload the home's keys too. Anyone who can read them there can sign for the run.",
    )
    max_corpus_gb: float | None = _disk(
        _gigabytes,
        "GB",
        "Disk limit for the corpus. Default: a quarter of what is free.",
        founder=False,
    )

    log_format: LogFormat = _watching(
        values.log_format,
        "console|json",
        "Format of the output on stderr.",
        default=LogFormat.CONSOLE,
    )
    verbose: bool = _flag(
        OptionGroup.WATCHING, "Show every event, settings, and tracebacks.", letter="-v"
    )
    metrics: HostPort = _watching(
        parse_host_port,
        "HOST:PORT",
        "Address for the web page and Prometheus metrics; port 0 picks one.",
        default=HostPort("127.0.0.1", 0),
    )
    metrics_host: tuple[str, ...] = _watching(
        many(values.host_name),
        "NAME",
        "A full name that metrics may be asked for by, as in a scrape config. May be repeated.",
        default=(),
    )
    notify: str | None = _watching(
        values.web_address,
        "URL",
        "Tell this URL what is wrong, and when it is over: a topic of ntfy, or a webhook of Slack"
        " or Discord. @FILE holds it, or LOCO_NOTIFY: process lists show options.",
    )
    track: tuple[str, ...] = _watching(
        many(values.tracker),
        "|".join(values.TRACKERS),
        "Draw this peer's curves there, too. May be repeated.",
        default=(),
    )
    metrics_token: str | None = _watching(
        values.page_token,
        "@FILE",
        "The file that holds a token for page and metrics. Or set it in LOCO_METRICS_TOKEN.",
    )
    price_per_hour: float | None = _watching(
        number("dollars an hour", 0, 1e6),
        "DOLLARS",
        "Price of this machine, to show what the run has cost on it so far.",
    )
    json_ready: bool = _flag(
        OptionGroup.WATCHING, "Print one line of JSON on stdout as soon as others can join."
    )
    notices: Notices | None = _watching(
        values.notices,
        "aws|gcp|azure",
        "Leave when this cloud tells the machine that it is taken away. Default: ask nobody.",
    )
    grace_s: float = _watching(
        number("seconds", 0, 3600),
        "SECONDS",
        "Time allowed for a graceful end after the first signal.",
        default=8.0,
    )

    origins: Mapping[str, Origin]

    def describe(self) -> list[str]:
        return [self.given(name) for name in OPTIONS]

    def given(self, name: str) -> str:
        """An option, its value and which place won: `threads = 2 (environment)`."""
        match getattr(self, OPTIONS[name].attribute):
            case None | ():
                shown = NOT_GIVEN
            case _ if name in SECRETS:
                shown = "(given)"
            case tuple() as parts:
                shown = " ".join(str(part) for part in parts)
            case bool() as yes:
                shown = "true" if yes else "false"
            case value:
                shown = str(value)
        return f"{name} = {shown} ({self.origins[name]})"


OPTIONS: Final[Mapping[str, Option]] = {
    option.name: option
    for field in dataclasses.fields(PeerConfig)
    if field.metadata
    for option in [dataclasses.replace(field.metadata["option"], attribute=field.name)]
}
USUAL: Final = PeerConfig(
    **{option.attribute: option.default for option in OPTIONS.values()}, origins={}
)
"""All defaults, and no home."""
SECRETS: Final = frozenset({"invite", "metrics-token", "notify"})
"""Options whose values are shown to nobody."""
NOT_GIVEN: Final = "-"

# --- which place wins -----------------------------------------------------------------------------


def default_home() -> Path:
    import platformdirs  # here, because `--help` does not need it

    return Path(platformdirs.user_data_dir("loco-peer", appauthor=False))


def resolve_home(command_line: Path | None, environment: Mapping[str, str]) -> Path:
    check_environment(environment)
    return Path(command_line or environment.get("LOCO_HOME") or default_home()).absolute()


def load_config(command_line: Mapping[str, Any], environment: Mapping[str, str]) -> PeerConfig:
    """Put the four places together. Raises ConfigError.

    Args:
        command_line: value by option name (`log-format`); None and empty lists mean not given.
        environment: all of it; what does not begin with `LOCO_` is ignored.
    """
    home = resolve_home(command_line.get("home"), environment)
    in_file = _read_file(home / "peer.toml")
    found = {o.name: _found(o, command_line, environment, in_file) for o in OPTIONS.values()}
    found |= _mapped(*found["listen"], found["announce"][1], environment)
    values = {OPTIONS[name].attribute: value for name, (value, _) in found.items()}
    origins = {name: origin for name, (_, origin) in found.items()}
    return PeerConfig(**values | {"home": home}, origins=origins)


def _found(
    option: Option,
    command_line: Mapping[str, Any],
    environment: Mapping[str, str],
    in_file: Mapping[str, Any],
) -> tuple[Any, Origin]:
    name, variable = option.name, option.environment_name
    if command_line.get(name) not in (None, [], ()):
        origin, raw, where = Origin.COMMAND_LINE, command_line[name], f"--{name}"
    elif environment.get(variable):
        origin, raw, where = Origin.ENVIRONMENT, environment[variable], variable
    elif option.key in in_file:
        origin, raw, where = Origin.FILE, in_file[option.key], f"{option.key} in peer.toml"
    else:
        return option.default, Origin.DEFAULT
    try:
        return option.parse(raw), origin
    except (ValueError, TypeError) as error:
        got = "" if name in SECRETS else f" (got {raw!r})"
        raise ConfigError(f"{where}: {error}{got}") from error


def check_given(**given: Any) -> None:
    """Refuse values of the command line, by option name. Raises ConfigError."""
    for name in given:
        _found(OPTIONS[name], given, {}, {})


def _mapped(
    listen: HostPort | None,
    listen_from: Origin,
    announce_from: Origin,
    environment: Mapping[str, str],
) -> dict[str, tuple[Any, Origin]]:
    """How a provider lets others reach us, if nobody has said it."""
    if announce_from is not Origin.DEFAULT:
        return {}
    where = listen or HostPort("0.0.0.0", DEFAULT_PORT)  # noqa: S104 - peers come from anywhere
    may_move = listen_from is not Origin.COMMAND_LINE
    try:
        mapped = mapped_by_provider(environment, where.port, may_move=may_move)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if mapped is None:
        return {}
    named = listen is not None and listen.port == mapped.port
    here = HostPort(where.host, mapped.port), listen_from if named else mapped.origin
    return {"listen": here, "announce": ((mapped.announce,), mapped.origin)}


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse a `LOCO_...` variable that nobody reads. Raises ConfigError."""
    known = [option.environment_name for option in OPTIONS.values()]
    for name, value in sorted(environment.items()):
        ours = name.startswith(ENVIRONMENT_PREFIX) and name not in known
        if ours and not is_service_link(name, value):
            raise ConfigError(f"unknown environment variable {name}{nearest(name, known)}")


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        tree = tomllib.loads(read_text(path, MAX_SPEC_BYTES)) if path.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    known = [option.key for option in OPTIONS.values() if option.name != "home"]
    for key in tree:
        if key not in known:
            raise ConfigError(f"unknown key '{key}' in {path}{nearest(key, known)}")
    return tree


def read_text(path: Path, most_bytes: int) -> str:
    """Raises ConfigError: the file cannot be read, is too long, or is not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise ConfigError(f"{path}: longer than {most_bytes} bytes")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} line {line}: not UTF-8 text; save it as UTF-8") from error


# --- options against the run ----------------------------------------------------------------------


def check_options(config: PeerConfig, spec: "RunSpec") -> None:
    """Refuse a run that this version cannot train, and options that mean nothing in it."""
    if config.expert is not None:
        spec.expert_named(config.expert)
    check_stages(spec)
    for name, fault_of in FAULTS.items():
        option = OPTIONS[name]
        is_given = getattr(config, option.attribute) is not option.default  # 0 is given
        if is_given and (fault := fault_of(config, spec)):
            raise ConfigError(f"{config.given(name)}: {fault}")


def refuse_experts(spec: "RunSpec", what: str) -> None:
    """Raises InvalidRunSpec: `what` does one model, and the run has several."""
    if spec.experts:
        names = ", ".join(expert.name for expert in spec.experts)
        raise InvalidRunSpec(
            f"the run has [[experts]] ({names}), and `loco-peer {what}` takes a run of one model:"
            " give it a run spec with an expert's sizes in [model]"
        )


def check_stages(spec: "RunSpec") -> None:
    """Refuse a pipeline that stages cannot begin or average as. Raises InvalidRunSpec."""
    if spec.pipeline.stages == 1:
        return
    given = f"the run has pipeline.stages = {spec.pipeline.stages}"
    if spec.sync.noloco is None:
        raise InvalidRunSpec(
            f"{given} and sync.method = '{spec.sync.method}': stages average by noloco so far"
        )
    if not spec.sync.noloco.is_whole:
        raise InvalidRunSpec(
            f"{given} and sync.noloco.fragments = '{spec.sync.noloco.fragments}':"
            " stages average by noloco so far, and whole parts"
        )
    if spec.model.init_from is not None:
        raise InvalidRunSpec(
            f"{given} and model.init_from = '{spec.model.init_from}':"
            " stages begin with weights of their own so far; leave init_from out"
        )
    sequences = spec.microbatch_sequences
    for key, count in (
        ("training.batch_size", spec.training.batch_size),
        ("data.validation_blocks", spec.data.validation_blocks),
    ):
        if count % sequences:
            raise InvalidRunSpec(
                f"{given} and {key} = {count}: all microbatches of stages are equally long, so it"
                f" must be a multiple of training.micro_batch ({sequences})"
            )


# --- what is wrong with an option that is given; empty where nothing is ---
def _stage_fault(config: PeerConfig, spec: "RunSpec") -> str:
    stage, stages = config.stage, spec.pipeline.stages
    if stages == 1:
        return "this run has no stages; leave it out"
    fits = stage is not None and stage < stages
    return "" if fits else f"must be from 0 to {stages - 1}, the run's stages; or leave it out"


def _gpus_fault(config: PeerConfig, spec: "RunSpec") -> str:
    if spec.pipeline.stages > 1:
        return (
            "a stage of a pipeline is trained on one device; leave it out, and start a peer for"
            " each GPU, with --device cuda:N and a home of its own"
        )
    count, batch = ranks_of(config.gpus), min(each.training.batch_size for each in spec.models)
    if count is None or count <= batch or config.split_context:
        return ""
    return (
        f"a step has {batch} sequences (training.batch_size), fewer than that; give at most {batch}"
    )


ONE_GPU: Final = "needs several GPUs of this machine; give --gpus all, or a number above 1"


def _split_fault(config: PeerConfig, spec: "RunSpec") -> str:
    """GPUs cannot divide every model; the trainer finds it out of a checkpoint's."""
    from protocol.run.families import config_of_sizes, division_fault  # `--help` needs neither

    count = ranks_of(config.gpus)
    if count == 1:
        return ONE_GPU
    texts = [
        json.dumps(config_of_sizes(each.model, 1)) if each.frozen is None else each.frozen.config
        for each in spec.models
        if each.frozen is not None or each.model.init_from is None
    ]
    faults = (division_fault(text, count) for text in texts if count)
    return next(filter(None, faults), "")


def _shards_fault(config: PeerConfig, spec: "RunSpec") -> str:
    """Parts of the weights are not for what needs all on each GPU."""
    from protocol.run.needs import sharding_fault

    if ranks_of(config.gpus) == 1:
        return ONE_GPU
    if config.split_context:
        return f"not together with {config.given('split-context')} so far"
    return next(filter(None, map(sharding_fault, spec.models)), "")


def ranks_of(gpus: str | None) -> int | None:
    """How many devices that names: one where none is named; None is all there are."""
    if gpus is None or gpus == "all":
        return 1 if gpus is None else None
    return int(gpus) if gpus.isdecimal() else len(gpus.split(","))


def overlap_fault(steps: int, spec: "RunSpec") -> str:
    """A tau is for runs with fragments, and ends before the next send."""
    if spec.sync.diloco is None:
        method = spec.sync.method
        return f"this run waits for no fragments (sync.method = '{method}'); leave it out"
    if steps < spec.sync.round_steps:
        return ""
    return (
        f"must be below the run's inner_steps ({spec.sync.round_steps}); lower it, or leave it out"
    )


FAULTS: Final[Mapping[str, Callable[[PeerConfig, "RunSpec"], str]]] = {
    "overlap-steps": lambda config, spec: overlap_fault(config.overlap_steps or 0, spec),
    "gpus": _gpus_fault,
    "split-context": _split_fault,
    "shard-weights": _shards_fault,
    "stage": _stage_fault,
}
