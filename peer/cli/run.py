"""`start` and `join`: check configuration, run spec and home, then run the daemon."""

import os
import socket
import sys
from dataclasses import replace
from errno import EADDRINUSE
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import trio

from peer.options.config import ConfigError, PeerConfig, check_options
from peer.options.exit_codes import ExitCode
from peer.options.needs_told import NotAgreed, corpus_tokens_of, say_needs
from peer.process.bottom_line import shown
from peer.process.rejoin import JoinAgain, handed_on, rejoin_command
from peer.process.terminal import hold_back_sigterm
from peer.runtime.imports import large_imports
from peer.state.home import Home, OtherRun
from peer.training.child_process import spare_child
from protocol.errors import InvalidRunSpec, leaves
from protocol.run.amendments import differing_keys
from protocol.run.run_spec import RunSpec, kind_of
from protocol.run.signed_spec import SignedSpec

from .options import Start, check_folder, read_spec


async def _run_daemon(config: PeerConfig, spec: RunSpec | None, home: Home) -> ExitCode:
    """The trainer's process starts first: both import for seconds, at the same time."""
    async with spare_child(config.threads or 0) as spare:
        with shown("starting: loading torch"), large_imports():
            _check_device(config)
            from peer.daemon.run import run_daemon

        return await run_daemon(config, spec, home, spare)


def _check_ports(config: PeerConfig) -> None:
    """Refuse a port that another program holds. Raises ConfigError."""
    for option, where in (("listen", config.listen), ("metrics", config.metrics)):
        if where is None or where.port == 0:
            continue
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((where.host, where.port))
        except OSError as error:
            if error.errno == EADDRINUSE:
                raise ConfigError(
                    f"{config.given(option)}: port {where.port} is taken; choose another with"
                    f" --{option}, or stop the program that uses it"
                ) from error
            # other faults of the address are reported when it is listened on


def _check_device(config: PeerConfig) -> None:
    """Refuse devices that are not here. Raises ConfigError."""
    if config.device is None and config.gpus is None:
        return
    from peer.training.device import choose_device, devices_of

    option = "device"
    try:
        choose_device(config.device or "auto")
        option = "gpus"
        devices = devices_of(config.gpus, config.device)
    except ValueError as error:
        raise ConfigError(f"{config.given(option)}: {error}") from error
    of_several = {"split-context": config.split_context, "shard-weights": config.shard_weights}
    for option, is_given in of_several.items():
        if is_given and len(devices) == 1:
            raise ConfigError(
                f"{config.given(option)}: needs several GPUs, and {config.given('gpus')} is one"
                " here; leave it out"
            )


def _check_track(config: PeerConfig) -> None:
    """Refuse a library that is not here; none is imported. Raises ConfigError."""
    for name in config.track:
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
            raise ConfigError(
                f"{config.given('track')}: {name} is not installed here;"
                f" install it with: pip install 'loco-peer[{name}]'"
            )


def run_peer(config: PeerConfig, start: Start | None) -> ExitCode:
    """Run a daemon in the foreground until it ends; without `start` it joins.

    Raises LocoError: configuration, run spec or home cannot be used, or the swarm refused us.
    """
    home = Home(config.home)
    signed, spec = home.run(), None
    if start is not None:
        spec = _checked_start(config, start, signed)
    elif signed is None and not config.bootstrap:
        raise ConfigError("join needs the address of a peer: --bootstrap ADDR, or LOCO_BOOTSTRAP")
    if config.export_when_done is not None:
        where = config.origins["export-when-done"]
        check_folder(config.export_when_done, f"export-when-done ({where})")
    _check_track(config)
    if start is None or not start.new_run:
        config = _as_followed(config, home)
    if config.verbose:
        print(*config.describe(), sep="\n", file=sys.stderr)
    home.prepare()
    with home.locked():
        _check_ports(config)
        if start is not None and start.new_run:
            old = home.put_run_away()
            if old is not None:
                print(f"the home's old run was moved to {old}", file=sys.stderr, flush=True)
        if start is not None and start.restore is not None:
            from peer.state.uploads import restore  # here: few starts restore

            print(f"restoring from {start.restore}", file=sys.stderr, flush=True)
            with shown("restoring"):
                for line in restore(start.restore, home, config.checkpoint_keep, config.expert):
                    print(f"  {line}", file=sys.stderr, flush=True)
        return _until_ended(config, spec, home)


def _as_followed(config: PeerConfig, home: Home) -> PeerConfig:
    """The options of a peer that follows: addresses and corpus were said of an earlier run."""
    followed = home.followed()
    if not config.follow or followed is None:
        return config
    return replace(config, bootstrap=(followed[1],), data=None)


def _until_ended(config: PeerConfig, spec: RunSpec | None, home: Home) -> ExitCode:
    """Run the daemon; once more where the user agrees to what its run takes."""
    code, ended, followed = ExitCode.OK, None, home.followed()
    try:
        code = trio.run(_run_daemon, config, spec, home)
    except* (JoinAgain, NotAgreed) as group:
        ended = leaves(group)[0]
    if isinstance(ended, NotAgreed):
        _ask(ended)
        if followed is not None:  # there it was going
            home.follow(*followed)
        return _until_ended(replace(config, yes=True), spec, home)
    if isinstance(ended, JoinAgain):
        _join_again(config, home, ended)
    return code


def _ask(refusal: NotAgreed) -> None:
    """Ask whether the run may take what it wants. Raises NotAgreed: nobody says so."""
    if not sys.stdin.isatty():
        raise refusal
    print(f"loco-peer: {refusal}\njoin nevertheless? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise refusal


def _join_again(config: PeerConfig, home: Home, again: JoinAgain) -> None:
    """Become a new process, which holds the home from its first moment. Does not return."""
    print(f"loco-peer: {again}; joining again in a new process", file=sys.stderr, flush=True)
    if again.part is not None:
        home.go_over_to(again.part)
    if again.successor is not None:
        home.follow(again.successor.run_id, again.successor.address)
    home.hand_on()
    command = rejoin_command(config)
    os.environ.update(handed_on(config))
    hold_back_sigterm()
    os.execv(command[0], command)  # noqa: S606 - our own command line, and no shell


def _checked_start(config: PeerConfig, start: Start, signed: SignedSpec | None) -> RunSpec | None:
    """The run spec that is founded, if one is. Raises ConfigError, OtherRun, InvalidRunSpec."""
    spec = None if start.run_toml is None else read_spec(start.run_toml)
    if config.bootstrap:
        raise ConfigError(
            "start founds a run or continues the home's run, and takes no bootstrap address"
            f" ({config.origins['bootstrap']}); to join a run: loco-peer join --bootstrap ADDR"
        )
    if start.restore is not None:
        if start.run_toml is not None or start.new_run:
            raise ConfigError("--restore continues the run that was uploaded: give it no run spec")
        return None
    if spec is None:
        if start.new_run:
            raise ConfigError("--new-run founds a run: loco-peer start RUN.toml --new-run")
        if signed is None:
            raise ConfigError(
                f"the home {config.home} has no run to continue: loco-peer start RUN.toml founds"
                " one, loco-peer new RUN.toml writes its run spec"
            )
        return None
    if config.stage:
        raise ConfigError(
            f"{config.given('stage')}: the first peer of a run holds stage 0; remove the option, or"
            " use it with join"
        )
    check_options(config, spec)
    if signed is None or start.new_run:
        return _new_run(config, spec)
    spec = _as_founded(spec, signed.spec())
    if keys := differing_keys(signed.spec(), spec):
        raise OtherRun(
            f"the home {config.home} belongs to the run '{signed.spec().name}' ({signed.run_id});"
            f" {start.run_toml} differs in {', '.join(keys)}. To continue that run: loco-peer"
            " start, without a run spec. To change it: loco-peer amend. To found a new run: use"
            " another --home, or --new-run, which moves the old run to old-runs/"
        )
    return spec


def _new_run(config: PeerConfig, spec: RunSpec) -> RunSpec:
    """The run spec to found; says what it takes here. Raises ConfigError, InvalidRunSpec."""
    if spec.experts and config.data is not None:
        raise ConfigError(
            f"{config.given('data')}: the run has experts, each with a source of its own; leave it"
            " out"
        )
    names = [expert.name for expert in spec.experts] or [""]
    for name, model in zip(names, spec.models, strict=True):
        try:
            named = "data.source" if config.data is None else config.given("data")
            _check_source(named, config.data or model.data.source)
            if model.data.replay is not None:
                _check_mixed(config)
                _check_source("data.replay", model.data.replay)
            _check_enough(model, config.data)
        except ConfigError as error:
            raise ConfigError(f"expert {name}: {error}" if name else str(error)) from error
    spec = _from_checkpoints(spec)
    own = spec.models[spec.expert_named(config.expert) or 0 if config.expert else 0]
    say_needs(config, own, corpus_tokens_of(own, config.data))
    return spec


def _from_checkpoints(written: RunSpec) -> RunSpec:
    """Add what checkpoints and tokenizer say, of all experts. Raises InvalidRunSpec."""
    for expert, model in zip(written.experts, written.models, strict=False):
        if model.model.init_from is not None:  # all experts have the tokenizer of the run
            named = model.data.model_copy(update={"tokenizer": model.data.tokenizer})
            try:
                _from_checkpoint(model.model_copy(update={"data": named}))
            except InvalidRunSpec as error:
                raise InvalidRunSpec(f"expert {expert.name}: {error}") from error
    return _from_checkpoint(written)


def _from_checkpoint(written: RunSpec) -> RunSpec:
    """Add what checkpoint and tokenizer say. Raises InvalidRunSpec."""
    is_plain = written.model.init_from is None and written.data.tokenizer == "bytes"
    if is_plain and not written.has_conversations:
        return written
    from peer.training.init_from import (
        rate_hint,
        template_hint,
        with_chat_template,
        with_checkpoint,
    )

    with shown("reading tokenizer and checkpoint"):
        spec = with_chat_template(with_checkpoint(written))
    for hint in (rate_hint(spec), template_hint(spec)):
        if hint is not None:
            print(hint, file=sys.stderr, flush=True)
    return spec


def _as_founded(written: RunSpec, founded: RunSpec) -> RunSpec:
    """Add what was left to checkpoint and tokenizer when the run was founded."""
    begins = written.model.init_from is not None
    left = {
        "data": {"chat_template", *["tokenizer"] * begins},
        "model": {"family"} if begins else (),
    }
    found = dict[str, Any]()
    for name, keys in left.items():
        own, there = getattr(written, name), getattr(founded, name)
        missing = {key: getattr(there, key) for key in set(keys) - own.model_fields_set}
        found[name] = own.model_copy(update=missing)
    return written.model_copy(update=found)


def _check_enough(spec: RunSpec, data: str | None) -> None:
    """Refuse texts that are too short, before anything is made. Raises ConfigError."""
    tokens = corpus_tokens_of(spec, data)
    blocks, length = spec.data.validation_blocks + 1, spec.model.context_length
    if tokens is not None and tokens < blocks * length:
        raise ConfigError(
            f"data.source: {data or spec.data.source} has about {tokens:,} tokens, and"
            f" data.validation_blocks = {spec.data.validation_blocks} and a block to train on take"
            f" {blocks * length:,}: use more text or fewer blocks"
        )


def _check_mixed(config: PeerConfig) -> None:
    """Refuse a file of tokens as own data: it is a whole corpus. Raises ConfigError."""
    if config.data is not None and kind_of(config.data)[0] == "tokens":
        raise ConfigError(
            f"{config.given('data')}: a file of tokens is the whole corpus, without data.replay;"
            " name it in data.source, and both are trained on, or leave data.replay out"
        )


def _check_source(key: str, source: str) -> None:
    """Refuse files that are not there; `key` names them. Raises ConfigError."""
    kind, pattern = kind_of(source)
    if kind == "tokens" and not Path(pattern).expanduser().is_file():
        raise ConfigError(f"{key}: there is no file {pattern}")
    if kind not in ("text", "jsonl", "parquet", "chat") or pattern.startswith("hf:"):
        return
    from peer.training.corpus.documents import glob_texts, shards_of
    from peer.training.corpus.packed import InvalidCorpus

    try:
        if kind != "text":
            shards_of(kind, pattern)
        elif len(texts := glob_texts(pattern)) == 1:
            _say_held_out(key, texts[0].path)
    except InvalidCorpus as error:
        raise ConfigError(f"{key}: {error}") from error


def _say_held_out(key: str, path: Path) -> None:
    """Say what a corpus of one text is validated with. Raises ConfigError."""
    from peer.training.corpus.packed import HELD_OUT_OF, tail_start

    try:
        size, start = path.stat().st_size, tail_start(path)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    print(
        f"{key} is one text, {path}: its last {100 // HELD_OUT_OF}%, {size - start:,} of"
        f" {size:,} bytes, is held out for validation",
        file=sys.stderr,
        flush=True,
    )
