"""A daemon of real parts: p2pd, torch, the home, signals.

Here they are opened and closed; parts.py puts them together, and peer.py runs them.
"""

import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import trio

from peer.facts import Facts
from peer.network.directory import SharedTable, open_directory
from peer.network.identity import Identity, load, load_or_create
from peer.network.libp2p import Libp2pNetwork, open_libp2p_network
from peer.network.pacing import BandwidthLimits, Pacing
from peer.observe.control import serve_control
from peer.observe.endpoint import Site, pages_of, serve
from peer.observe.event_names import EventName
from peer.observe.events import MAX_ERROR_CHARS, EventLog, LineFile
from peer.observe.notify import tell_problems
from peer.observe.tracking import Tracking, curve_of, point_of
from peer.options.config import DEFAULT_PORT, ConfigError, PeerConfig, check_options
from peer.options.exit_codes import ExitCode
from peer.options.needs_told import CORPUS_SHARE, check_agreed, say_needs
from peer.options.values import HostPort, LogFormat, Notices, Origin
from peer.process.bottom_line import bottom_line
from peer.process.notices import until_taken_away
from peer.process.rejoin import JoinAgain
from peer.process.signals import run_until_signalled
from peer.runtime.work import RealWork
from peer.state.checkpoints import CheckpointStore
from peer.state.home import Home
from peer.state.kept_files import Acquaintances, AdmissionFile, Pins
from peer.state.uploads import UploadFailed, Uploads
from peer.training.child_process import SpareChild
from protocol.admission.statements import Successor
from protocol.errors import InvalidRunSpec
from protocol.membership.dial_back import host_and_port
from protocol.membership.view import Roster
from protocol.names import short_id
from protocol.run.layout import stage_of_part
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

from .checkpointing import CheckpointPlan, check_room_to_begin, free_bytes
from .control_requests import ControlRequests
from .entry import Entry, Following, expert_to_go_on_with, found, join
from .links import SILENCE_S
from .outside import be_reached
from .parts import PeerParts, PeerSettings
from .peer import Peer
from .provision import RealProvision, free_room
from .report import LOOK_S, Console, Report, ShowLine, join_address
from .returning import come_back
from .services import DaemonServices, Keys


async def run_daemon(
    config: PeerConfig, spec: RunSpec | None, home: Home, spare: SpareChild
) -> ExitCode:
    """Run one peer until it ends.

    Args:
        spec: the run to found; None goes on with the home's, or joins one.
        home: prepared and locked.
        spare: the process of the first trainer.

    Raises:
        LocoError: see peer/cli/app.py for how each ends.
    """
    stop = trio.Event()

    async def job() -> ExitCode:
        try:
            with bottom_line() as line:
                await _Daemon(config, home, spare, stop, line.show).run(spec)
        except* JoinAgain:
            if not stop.is_set():  # else somebody wants us gone, and asked while all was closed
                raise
        return ExitCode.OK

    def say_late() -> None:
        sentence = f"it did not end within --grace {config.grace_s:g} s, and is cut off"
        print(f"loco-peer: {sentence}", file=sys.stderr, flush=True)

    return await run_until_signalled(job, stop, grace_s=config.grace_s, say_late=say_late)


@dataclass(eq=False)
class _Daemon:
    config: PeerConfig
    home: Home
    spare: SpareChild
    stop: trio.Event
    show: ShowLine

    def __post_init__(self) -> None:
        config, folder = self.config, self.home.checkpoints_dir
        max_bytes = _bytes_of(config.checkpoint_max_gb)
        self._checkpoints = CheckpointStore(folder, config.checkpoint_keep, max_bytes)

    async def run(self, spec: RunSpec | None) -> None:
        identity = load_or_create(self.home.identity_path)
        incarnation = self.home.next_incarnation()
        async with open_libp2p_network(
            self.home.identity_path,
            listen=[self._listen().multiaddr()],
            announce=self.config.announce,
            runtime_dir=self.home.sockets,
        ) as network:
            directory = await open_directory(network)
            ports = [each[1] for each in map(host_and_port, network.listening) if each is not None]
            if ports:
                self.home.keep_port("listen", ports[0])
            parts = self._parts(network, directory, incarnation, self._keys(identity, spec))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_watch_restarts, directory, parts)
                announced_by = self.config.origins["announce"]
                parts.facts.reach.given = dict.fromkeys(self.config.announce, announced_by)
                peer = Peer(self._settings(parts, founds=spec is not None), parts)
                await self._start_beside(peer, nursery)
                await peer.run(self._entry(spec))
                nursery.cancel_scope.cancel()

    async def _start_beside(self, peer: Peer, nursery: trio.Nursery) -> None:
        """Start what runs beside the peer: pages, control, notices, and those that watch it."""
        parts, events, report = peer.parts, peer.parts.events, peer.parts.report
        report.price_per_hour = self.config.price_per_hour
        report.metrics_url = await self._serve_pages(nursery, report)
        nursery.start_soon(report.keep_history)
        handlers = ControlRequests(peer).handlers()
        await nursery.start(
            serve_control, self.home.control_socket, handlers, events.request_failed
        )
        nursery.start_soon(be_reached, parts, self.config.relay_mbps)
        if self.config.notices is not None:
            nursery.start_soon(self._heed_notices, self.config.notices, events)
        if self.config.notify is not None:
            nursery.start_soon(partial(tell_of, parts, self.config.notify))
        for sink in self.config.track:
            nursery.start_soon(tracking_of(parts, sink, self.home.track_dir, self.stop).run)
        export = f"{self._command('export')} --hf DIR"
        show = self.show if self.config.log_format is LogFormat.CONSOLE else lambda _: False
        nursery.start_soon(Console(report, parts.facts, events, export, show).run)

    async def _heed_notices(self, notices: Notices, events: EventLog) -> None:
        cloud = str(notices.cloud)

        def tell_silent(detail: str) -> None:
            events.emit(EventName.NOTICES_UNHEARD, cloud=cloud, detail=detail)

        await until_taken_away(notices, tell_silent)
        events.emit(EventName.NOTICE_RECEIVED, cloud=cloud)
        self.stop.set()

    def _entry(self, spec: RunSpec | None) -> Entry:
        config, signed = self.config, self.home.run()
        part = self.home.take_next_part()
        stage = stage_of_part(part) if config.stage is None else config.stage
        expert = config.expert or self.home.expert()
        if (following := self._following()) is not None:
            self.home.successor_path.unlink()  # said again when we are there; until then, once
            given = config.bootstrap, config.stage, config.expert
            return partial(join, *given, following=following)
        if signed is not None:
            kept = signed.spec().name_of(part) or self.home.expert()
            expert = expert_to_go_on_with(signed.spec(), kept, config.expert)
            return partial(come_back, signed, config.bootstrap, stage, expert, config.alone)
        if spec is not None:
            return partial(found, spec, expert)
        return partial(join, config.bootstrap, stage, expert)

    def _following(self) -> Following | None:
        """The run that this home is about to follow."""
        home, followed, signed = self.home, self.home.followed(), self.home.run()
        if not self.config.follow or followed is None or signed is None:
            return None
        run_id, address = followed

        def move(successor: SignedSpec) -> None:
            if successor.spec().experts:  # what one of them takes is known when it is chosen
                raise InvalidRunSpec("the run that follows has experts: join it in another --home")
            home.follow(run_id, address)  # first: what is cut off from here on goes on there
            home.put_run_away(successor)

        return None if run_id == signed.run_id else Following(run_id, move)

    def _follows(self, successor: Successor) -> bool:
        """Whether to follow, which is done once: two runs may name each other.

        A run's founder stays: others hear from it where to go, and its key is put away with a run.
        """
        home = self.home
        founds, left = home.founder_key_path.exists(), home.has_left(successor.run_id)
        return self.config.follow and not founds and not left

    def _command(self, name: str) -> str:
        """A command for this home, as its owner would type it."""
        is_default = self.config.origins["home"] is Origin.DEFAULT
        return f"loco-peer {name}" + ("" if is_default else f" --home {self.home.root}")

    def _keys(self, identity: Identity, spec: RunSpec | None) -> Keys:
        """The keys of this home; one that founds a run is given a founder's key."""
        path = self.home.founder_key_path
        if spec is not None:
            return Keys(identity, load_or_create(path))
        return Keys(identity, load(path) if path.exists() else None)

    async def _serve_pages(self, nursery: trio.Nursery, report: Report) -> str:
        """Serve metrics and pages; their URL stays the same after a restart, if it can be had."""
        config = self.config
        where = self._with_port(config.metrics, "metrics")
        pages = pages_of(report.metrics, lambda history: report.snapshot(history=history))
        site = Site(pages, config.metrics_host, config.metrics_token)
        url: str = await nursery.start(serve, where, site)
        port = urlsplit(url).port
        assert port is not None
        self.home.keep_port("metrics", port)
        return url

    def _parts(
        self,
        network: Libp2pNetwork,
        directory: SharedTable,
        incarnation: int,
        keys: Keys,
    ) -> PeerParts:
        config, home, work = self.config, self.home, RealWork()
        facts = Facts(network.peer_id, incarnation, doing_since_s=trio.current_time())
        events = EventLog(
            LineFile(home.event_log_path).write_line,
            peer=network.peer_id,
            wall_time_s=directory.swarm_time_s,
            log_format=config.log_format,
            verbose=config.verbose,
            stream=sys.stderr,
        )
        network.tellers.append(events.stream_failed)
        limits = BandwidthLimits(config.max_upload_mbps, config.max_download_mbps)
        network.pacing = Pacing(limits)
        return PeerParts(
            network=network,
            pacing=network.pacing,
            directory=directory,
            work=work,
            roster=Roster(SILENCE_S),
            events=events,
            keys=keys,
            facts=facts,
            version=version_of("loco-peer"),
            admission_file=AdmissionFile(home.admission_path),
            acquaintances=Acquaintances(home.neighbours_path),
            checkpoints=self._checkpoints,
            token=config.invite,
            pins=Pins(home.known_peers_path),
            provision=RealProvision(
                config, home, network.peer_id, work, self.spare, facts.progressed
            ),
        )

    def _settings(self, parts: PeerParts, *, founds: bool) -> PeerSettings:
        config, home = self.config, self.home
        is_new = home.run() is None or self._following() is not None
        joins = is_new and not founds
        folder, on_finished = config.export_when_done, None
        if folder is not None:
            on_finished = partial(export_finished, home, folder.absolute(), parts.events)
        return PeerSettings(
            home=str(home.root),
            state_dir=home.state_dir,
            exit_when_done=config.exit_when_done,
            grace_s=config.grace_s,
            on_ready=lambda: self._announce(parts, founds=founds),
            check_spec=partial(self._check_spec, joins=joins),
            bind_run=partial(self._bind_run, parts.facts),
            observe_round=parts.facts.count_timing,
            keeps_stage=config.stage is not None,
            expert=config.expert,
            follows=self._follows,
            checkpoints=CheckpointPlan(config.checkpoint_every_s, self._uploads(parts)),
            on_finished=on_finished,
            most_corpus_bytes=self._most_corpus_bytes,
            on_run=partial(say_needs, config, again=True) if is_new else None,
            stop=self.stop,
        )

    def _bind_run(self, facts: Facts, signed: SignedSpec) -> None:
        self.home.bind_run(signed)
        if facts.expert is not None:
            self.home.keep_expert(facts.expert)

    def _check_spec(self, spec: RunSpec, number: int | None, *, joins: bool) -> None:
        """Say what a run takes that is new to this home, and that others have founded.

        Args:
            number: of the expert; without it a run that has any is looked at as a whole.

        Raises ConfigError, InvalidRunSpec, HomeError: it is not for this machine.
        """
        config, expert = self.config, ""
        check_options(config, spec)
        if number is not None:
            expert = f"the expert '{spec.experts[number].name}' of "
            spec = spec.of_expert(number)
        elif spec.experts:
            return
        if joins:
            say_needs(config, spec, None)
        check_room_to_begin(self._checkpoints, spec, config.data)
        if joins:
            check_agreed(config, spec, free_room(config, self.home.root), expert=expert)

    def _most_corpus_bytes(self, held_bytes: int) -> int:
        """Room for pieces of the corpus, of which `held_bytes` are here."""
        given = _bytes_of(self.config.max_corpus_gb)
        free = free_bytes(self.home.root)
        share = max(held_bytes, CORPUS_SHARE * (held_bytes + free))
        return int(share if given is None else given)

    def _uploads(self, services: DaemonServices) -> Uploads | None:
        """The copies of checkpoints elsewhere. Raises ConfigError: that place cannot be reached."""
        config, own_id = self.config, services.facts.peer_id
        url, keep, keys = config.checkpoint_upload, config.checkpoint_keep, config.upload_keys
        if url is None:
            return None
        try:
            return Uploads(url, own_id, keep, self.home, keys=keys)
        except UploadFailed as error:
            raise ConfigError(f"{error} (checkpoint-upload)") from error

    def _listen(self) -> HostPort:
        where = self.config.listen
        if where is None:
            return self._with_port(HostPort("0.0.0.0", 0), "listen", DEFAULT_PORT)  # noqa: S104 - peers come from anywhere
        return self._with_port(where, "listen")

    def _with_port(self, where: HostPort, purpose: str, *defaults: int) -> HostPort:
        """Where to listen; port 0 becomes the one of last time, else the first free default."""
        if where.port != 0:
            return where
        wanted = (self.home.kept_port(purpose), *defaults)
        free = (port for port in wanted if port is not None and _is_free(port))
        return HostPort(where.host, next(free, 0))

    def _announce(self, parts: PeerParts, *, founds: bool) -> None:
        """Say where others can join, and what a founder must not lose."""
        best = join_address(parts.network, parts.facts)
        addresses = list(dict.fromkeys([best.address, *parts.network.addresses]))
        join = f"loco-peer join --bootstrap {best.address}"
        if self.config.json_ready:
            ready = {
                "peer_id": parts.facts.peer_id,
                "addresses": addresses,
                "join": join,
                "reachable_from": str(best.scope),
                "metrics": parts.report.metrics_url,
            }
            print(json.dumps(ready), flush=True)
            return
        needs_invitation = parts.admission.wants_invitations
        if needs_invitation and parts.admission.may_sign:
            join = f"loco-peer invite --home {self.home.root}    (prints a line for one of them)"
        elif needs_invitation:
            join = "loco-peer invite    (where the run was started, or at a delegate's)"
        print(f"others join with:\n  {join}", flush=True)
        if best.note and not needs_invitation:  # else `invite` shows the address, and says it
            print(f"  ({best.note})", flush=True)
        page, top = parts.report.status().page, self._command("top")
        print(f"watch it: {page} (in a terminal: {top})", flush=True)
        if founds:
            key = self.home.founder_key_path
            print(f"keep a copy of {key}: nothing else signs for this run", flush=True)


async def tell_of(parts: PeerParts, url: str) -> None:
    """Tell a URL of this peer's problems, until cancelled."""
    facts = parts.facts

    def who() -> str:
        run = "" if facts.spec is None else f" of run '{facts.spec.founding.name}'"
        return f"loco-peer {short_id(facts.peer_id)}{run}"

    await tell_problems(
        url,
        lambda: parts.report.recent().problems,
        who,
        lambda why: parts.events.emit(EventName.NOTICE_FAILED, detail=why),
    )


def tracking_of(parts: PeerParts, sink: str, folder: Path, stop: trio.Event) -> Tracking:
    return Tracking(
        lambda: curve_of(parts.report.now(), sink, folder),
        lambda: point_of(parts.report.now(), parts.directory.swarm_time_s()),
        lambda why: parts.events.emit(EventName.TRACKING_FAILED, sink=sink, detail=why),
        stop,
    )


async def _watch_restarts(directory: SharedTable, services: DaemonServices) -> None:
    """Report restarts of p2pd and of the directory, which heal by themselves."""
    facts, emit, seen = services.facts, services.events.emit, 0
    while True:
        p2pd = services.network.statistics()
        if p2pd.restarts > seen:
            why, seen = p2pd.last_failure, p2pd.restarts
            emit(EventName.NETWORK_RESTARTED, reason=why, restarts=seen)
        if directory.restarts > facts.directory_restarts:
            why, facts.directory_restarts = directory.last_failure, directory.restarts
            emit(EventName.DIRECTORY_RESTARTED, reason=why, restarts=directory.restarts)
        await trio.sleep(LOOK_S)


PROGRAM: Final = "from peer.cli import main; main()"


async def export_finished(home: Home, folder: Path, events: EventLog) -> None:
    """Export this peer's model to the folder, and tell how that ended.

    `loco-peer export` runs in a process of its own: the memory that it takes is given back, and
    what goes wrong there harms no peer.
    """
    command = [sys.executable, "-P", "-c", PROGRAM, "export"]
    command += ["--home", str(home.root), "--hf", str(folder)]
    own = home.expert()  # others may be done earlier or later
    command += [] if own is None else ["--experts", own]
    try:
        ran = await trio.run_process(
            command,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        said = f"no process could be started: {error.strerror}"
    else:
        if ran.returncode == 0:
            events.emit(EventName.RUN_EXPORTED, path=str(folder))
            return
        said = ran.stderr.decode(errors="replace").strip()[-MAX_ERROR_CHARS:]
    events.emit(
        EventName.EXPORT_FAILED,
        detail=f"{said}; try again: loco-peer export --home {home.root} --hf {folder}",
    )


def _bytes_of(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else gigabytes * 1e9


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
