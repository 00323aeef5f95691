"""Every event of the event log: the closed list, with the fields each carries.

Every line has besides: `time` (swarm time, Unix seconds), `monotonic_s` (the daemon's clock),
`peer` (who wrote it) and `event`. Names are in the past tense. Peer ids are whole; durations end in
`_s`, sizes in `_bytes`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class EventName(StrEnum):
    """Names of the events."""

    DAEMON_STARTED = "DaemonStarted"
    PEER_LINKED = "PeerLinked"
    PEER_LOST = "PeerLost"
    PEER_LEFT = "PeerLeft"
    REACHABILITY_CHANGED = "ReachabilityChanged"
    PEER_RULED_ON = "PeerRuledOn"
    PEER_IGNORED = "PeerIgnored"
    PEER_CONVICTED = "PeerConvicted"
    RUN_RECEIVED = "RunReceived"
    RUN_AMENDED = "RunAmended"
    RUN_RESUMED = "RunResumed"
    RUN_BEGUN_ANEW = "RunBegunAnew"
    NEIGHBOURS_AWAITED = "NeighboursAwaited"
    REFUSED_BY_PEER = "RefusedByPeer"
    CHECKPOINT_WRITTEN = "CheckpointWritten"
    CHECKPOINT_COPIED = "CheckpointCopied"
    CHECKPOINT_FAILED = "CheckpointFailed"
    CHECKPOINT_REFUSED = "CheckpointRefused"
    CHECKPOINT_SET_ASIDE = "CheckpointSetAside"
    ROOM_FOUND_SMALL = "RoomFoundSmall"
    GROUP_ENTERED = "GroupEntered"
    STATE_PROGRESSED = "StateProgressed"
    STATE_RECEIVED = "StateReceived"
    PIECES_AWAITED = "PiecesAwaited"
    PIECE_FAILED = "PieceFailed"
    DISK_REFUSED = "DiskRefused"
    STAGE_REBUILT = "StageRebuilt"
    STAGE_LEFT_OUT = "StageLeftOut"
    STAGE_TAKEN_IN = "StageTakenIn"
    FINAL_AVERAGING = "FinalAveraging"
    TRAINING_PAUSED = "TrainingPaused"
    TRAINING_RESUMED = "TrainingResumed"
    ROUND_OPENED = "RoundOpened"
    ROUND_CLOSED = "RoundClosed"
    ROUND_LENGTH_CHANGED = "RoundLengthChanged"
    PROPOSAL_SENT = "ProposalSent"
    PROPOSAL_ACCEPTED = "ProposalAccepted"
    PROPOSAL_REFUSED = "ProposalRefused"
    ROUND_AVERAGED = "RoundAveraged"
    ROUND_SKIPPED = "RoundSkipped"
    FRAGMENT_RETURNED = "FragmentReturned"
    TRAINER_STARTED = "TrainerStarted"
    TRAINER_DIED = "TrainerDied"
    CODEC_CHOSEN = "CodecChosen"
    VALIDATED = "Validated"
    DIRECTORY_RESTARTED = "DirectoryRestarted"
    NETWORK_RESTARTED = "NetworkRestarted"
    STREAM_FAILED = "StreamFailed"
    REQUEST_FAILED = "RequestFailed"
    BOOTSTRAP_FAILING = "BootstrapFailing"
    IDENTITY_PINNED = "IdentityPinned"
    RUN_FINISHED = "RunFinished"
    RUN_EXPORTED = "RunExported"
    EXPORT_FAILED = "ExportFailed"
    LEAVING = "Leaving"


_ROUND: Final = {"round": "number of the round", "step": "nominal"}
_REMOTE: Final = {"remote": "the other peer's id"}
_FRAGMENT: Final = {"fragment": "its number, in streaming gossip; then rounds are its sends"}

FIELDS: Final[Mapping[EventName, Mapping[str, str]]] = {
    EventName.DAEMON_STARTED: {
        "version": "of loco-peer",
        "incarnation": "how often this home was started",
        "addresses": "multiaddrs that others can dial",
        "home": "directory",
    },
    EventName.PEER_LINKED: _REMOTE | {"incarnation": "theirs", "round": "theirs"},
    EventName.PEER_LOST: _REMOTE | {"reason": "what broke the link, or silence"},
    EventName.PEER_LEFT: _REMOTE,
    EventName.REACHABILITY_CHANGED: {
        "reachable": "whether others can dial us: yes, no or unknown",
        "nat": "what stands between: none, cone, symmetric or unknown",
    },
    EventName.PEER_RULED_ON: _REMOTE | {"verdict": "admit, ban or delegate"},
    EventName.PEER_IGNORED: _REMOTE | {"fault": "the last of those held against it"},
    EventName.PEER_CONVICTED: _REMOTE,
    EventName.RUN_RECEIVED: _REMOTE | {"run_id": "of the run spec", "name": "of the run"},
    EventName.RUN_AMENDED: {
        "version": "of the amendment",
        "round": "the first in which it is in force",
        "keys": "of the run spec that it changes",
    },
    EventName.RUN_RESUMED: _ROUND
    | {
        "path": "of the checkpoint",
        "over": "whether it is that of the run's end",
        "tokens": "that this peer had trained",
    },
    EventName.RUN_BEGUN_ANEW: {"detail": "why: the founder has no checkpoint, and nobody a state"},
    EventName.NEIGHBOURS_AWAITED: {
        "neighbours": "that the home remembers, of whom none can be reached",
        "detail": "why not, of the last that was tried",
        "left_s": "until the run is gone on with alone",
    },
    EventName.REFUSED_BY_PEER: _REMOTE | {"detail": "why it does not take us in"},
    EventName.CHECKPOINT_WRITTEN: _ROUND
    | {
        "path": "its folder",
        "bytes": "of its files",
        "stalled_s": "for how long no round was trained",
        "seconds": "until it was on the disk",
        "over": "whether it is that of the run's end",
        "missing": "why it has the slow weights alone, where that is so",
    },
    EventName.CHECKPOINT_COPIED: {"path": "of the copy", "seconds": "that took"},
    EventName.CHECKPOINT_FAILED: {
        "detail": "why it was not written, or not copied; it is tried again"
    },
    EventName.CHECKPOINT_REFUSED: {"path": "its folder", "detail": "what is wrong with it"},
    EventName.CHECKPOINT_SET_ASIDE: _ROUND
    | {"path": "its folder from now on", "followed_step": "of the older state that others train"},
    EventName.ROOM_FOUND_SMALL: {
        "detail": "what the disk has no room for before training begins, and what to do"
    },
    EventName.GROUP_ENTERED: {
        "group": "its digest, which stands in all that concerns it",
        "part": "of the model that we hold, like all others in the group",
        "padded_parameters": "of that part",
    },
    EventName.STATE_PROGRESSED: {
        "share": "of the state that is here",
        "remotes": "peers it came from so far",
        "bytes": "that came",
        "left_s": "until it is here, at this pace",
    },
    EventName.STATE_RECEIVED: _ROUND
    | {
        "remotes": "peers it came from, the one that gave most first",
        "bytes": "that came",
        "kept_bytes": "that were here, in a checkpoint of ours",
        "seconds": "the transfer took",
    },
    EventName.PIECES_AWAITED: {
        "pieces": "of the corpus that the next step needed and that were not here",
        "seconds": "for which training stood still for them",
    },
    EventName.PIECE_FAILED: _REMOTE
    | {"piece": "of the corpus, its number", "detail": "why what came is not it"},
    EventName.DISK_REFUSED: {
        "piece": "of the corpus, its number, that could not be written or removed",
        "detail": "what the system says; it is tried every minute until the disk obeys",
    },
    EventName.STAGE_REBUILT: {
        "stage": "that nobody held any more",
        "remotes": "peers whose stages it was made of; none where it begins as the model did",
        "untrained": "parameters that begin as the model did",
    },
    EventName.STAGE_LEFT_OUT: {
        "stage": "that nobody holds any more, and that our microbatches leave out from now on",
        "step": "nominal",
    },
    EventName.STAGE_TAKEN_IN: {
        "stage": "that somebody holds again, and that our microbatches visit from now on",
        "step": "nominal",
        "seconds": "for which it was left out",
    },
    EventName.FINAL_AVERAGING: {
        "peers": "that take part",
        "meetings": "planned ones of this peer",
    },
    EventName.TRAINING_PAUSED: _ROUND,
    EventName.TRAINING_RESUMED: {"step": "nominal", "seconds": "since the pause began"},
    EventName.ROUND_OPENED: _ROUND
    | {"quota": "our inner steps", "members": "peers that take data"},
    EventName.ROUND_CLOSED: _ROUND
    | {
        "steps": "inner steps done",
        "tokens": "trained",
        "loss": "mean training loss, nats per token",
        "seconds": "of training",
    },
    EventName.PROPOSAL_SENT: _ROUND | _REMOTE | _FRAGMENT,
    EventName.PROPOSAL_ACCEPTED: _ROUND | _REMOTE | _FRAGMENT,
    EventName.PROPOSAL_REFUSED: _ROUND
    | _REMOTE
    | _FRAGMENT
    | {"reason": "a RefusalReason, `unreachable` or `withdrawn`", "sentence": "for people"},
    EventName.ROUND_AVERAGED: _ROUND
    | _FRAGMENT
    | {
        "partner": "peer id",
        "seconds": "of the exchange",
        "searched_s": "until the partner was found",
        "age": "nominal steps from the snapshot to the merge",
        "distance": "root mean square per parameter of our weights less the partner's",
    },
    EventName.FRAGMENT_RETURNED: _ROUND
    | {
        "fragment": "its number",
        "contributors": "peers in the average, at most",
        "missing": "chunks without a result",
        "moved": "chunks whose result is without us, or that were healed",
        "digest": "of the fragment's outer copy: the same for all peers that are where we are",
        "seconds": "since it was sent",
    },
    EventName.ROUND_SKIPPED: _ROUND
    | _FRAGMENT
    | {"reason": "a SkipReason", "partner": "peer id, if there was one", "detail": "for people"},
    EventName.ROUND_LENGTH_CHANGED: _ROUND
    | {"inner_steps": "H from now on", "before": "H until now"},
    EventName.TRAINER_STARTED: {
        "device": "it trains on",
        "precision": "it computes in",
        "parameters": "of the model",
        "micro_batch": "sequences per forward pass",
        "steps_per_s": "of the trainer alone",
        "codec": "what codes its weights: plain or compiled loops, and why if not others",
    },
    EventName.TRAINER_DIED: {"reason": "one word", "detail": "for people"},
    EventName.CODEC_CHOSEN: {
        "codec": "of the run",
        "loops": "what codes with it in the daemon, as the trainer's",
    },
    EventName.VALIDATED: _ROUND
    | {"loss": "validation loss of the slow weights", "seconds": "it took"},
    EventName.DIRECTORY_RESTARTED: {"reason": "for people", "restarts": "so far"},
    EventName.NETWORK_RESTARTED: {"reason": "for people", "restarts": "so far"},
    EventName.STREAM_FAILED: _REMOTE
    | {
        "protocol": "of the stream, which a bug of ours has ended; once for each peer and error",
        "error": "its type",
        "detail": "its message",
    },
    EventName.REQUEST_FAILED: {
        "request": "of a command of ours, which a bug of ours has ended",
        "error": "its type",
        "detail": "its message",
    },
    EventName.BOOTSTRAP_FAILING: {
        "address": "that was tried",
        "step": "resolve, dial, handshake, protocol or directory",
        "detail": "what went wrong",
        "cure": "what would help; empty where the detail says it",
    },
    EventName.IDENTITY_PINNED: {
        "address": "HOST:PORT as it was given",
        "multiaddr": "the same with the peer id that answered there, trusted from now on",
    },
    EventName.RUN_FINISHED: _ROUND
    | {
        "validation_loss": "of the last slow weights",
        "replica_loss": "of our own before the final averaging",
    },
    EventName.RUN_EXPORTED: {"path": "folder of the Hugging Face checkpoint"},
    EventName.EXPORT_FAILED: {"detail": "why there is none, and how to try again"},
    EventName.LEAVING: {"reason": "'requested', or 'banned'"},
}
