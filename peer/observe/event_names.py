"""The closed list of events, and the console's sentence for each (docs/events.md).

People want to know which peers come and go, what failed and what to do. So events that happen
several times a minute in a healthy run have no sentence, nor have those that the line of progress
(peer/daemon/report.py) tells, or `doing` while a peer starts (BootstrapFailing, NeighboursAwaited,
StateProgressed).
Without a sentence an event is shown with `--verbose` only.

A sentence is a format string over the event's fields; ids in it are short, numbers are rounded.
"""

from enum import StrEnum
from typing import Self


class EventName(StrEnum):
    sentence: str | None

    def __new__(cls, name: str, sentence: str | None = None) -> Self:
        member = str.__new__(cls, name)
        member._value_, member.sentence = name, sentence
        return member

    DAEMON_STARTED = "DaemonStarted"
    PEER_LINKED = "PeerLinked", "linked with {remote}"
    PEER_LOST = "PeerLost", "lost {remote}: {reason}"
    PEER_LEFT = "PeerLeft", "{remote} left"
    REACHABILITY_CHANGED = (
        "ReachabilityChanged",
        "others can dial this peer: {reachable} (router: {nat})",
    )
    PEER_RULED_ON = "PeerRuledOn", "ruling on {remote}: {verdict}"
    PEER_IGNORED = "PeerIgnored", "ignoring {remote} for some minutes: {fault}"
    PEER_CONVICTED = "PeerConvicted", "ignoring {remote}, which was proved to have lied"
    RUN_RECEIVED = "RunReceived", "run '{name}' ({run_id}) received from {remote}"
    RUN_AMENDED = "RunAmended", "the run is amended from round {round} on: {keys}"
    SUCCESSOR_NAMED = (
        "SuccessorNamed",
        "the founder goes on with this model in run {successor}: with --follow a peer joins it",
    )
    RUN_RESUMED = "RunResumed", "continuing from the checkpoint of step {step}{over}"
    RUN_BEGUN_ANEW = "RunBegunAnew", "starting the run again from its seed: {detail}"
    EXPERT_CHOSEN = "ExpertChosen", "trains the expert '{expert}'"
    EXPERT_UNFIT = "ExpertUnfit", "the expert '{expert}' does not fit this machine: {detail}"
    EXPERT_BEGUN = "ExpertBegun", "the expert '{expert}' begins with {weights} weights: {detail}"
    EXPERT_STANDS = (
        "ExpertStands",
        "nobody trains the expert '{expert}' any more, which stands at step {step}",
    )
    NEIGHBOURS_AWAITED = "NeighboursAwaited"
    REFUSED_BY_PEER = "RefusedByPeer", "{remote} refuses this peer: {detail}"
    NOTICE_RECEIVED = "NoticeReceived", "{cloud} takes this machine away: leaving"
    NOTICES_UNHEARD = (
        "NoticesUnheard",
        "no metadata service of {cloud} answers, so no notice would be heard: {detail}",
    )
    CHECKPOINT_WRITTEN = "CheckpointWritten", "checkpoint of step {step}{over} written"
    CHECKPOINT_COPIED = "CheckpointCopied"
    CHECKPOINT_FAILED = "CheckpointFailed", "a checkpoint was not written: {detail}"
    CHECKPOINT_REFUSED = "CheckpointRefused", "the checkpoint {path} cannot be used: {detail}"
    CHECKPOINT_SET_ASIDE = (
        "CheckpointSetAside",
        (
            "the others continue from step {followed_step}; the newer checkpoint of step {step} is"
            " kept as {path}"
        ),
    )
    ROOM_FOUND_SMALL = "RoomFoundSmall", "the disk is small for this run: {detail}"
    GROUP_ENTERED = "GroupEntered"
    STATE_PROGRESSED = "StateProgressed"
    STATE_RECEIVED = "StateReceived", "received the state in {seconds:.1f} s"
    PIECES_AWAITED = "PiecesAwaited"
    PIECE_FAILED = "PieceFailed"
    DISK_REFUSED = "DiskRefused", "the disk refused piece {piece} of the corpus: {detail}"
    CORPUS_UNHELD = "CorpusUnheld", "{detail}"
    FIRST_WEIGHTS_MISSING = (
        "FirstWeightsMissing",
        "nobody gives the first weights of expert {expert}: start the founder again, who has them",
    )
    DOMAIN_MISSING = (
        "DomainMissing",
        "what is held out of the domain of expert {expert} is not here yet: {detail}",
    )
    STAGE_REBUILT = "StageRebuilt", "rebuilt stage {stage} from its neighbours"
    STAGE_LEFT_OUT = "StageLeftOut", "no peer holds stage {stage}; training continues without it"
    REPLICAS_DIFFER = (
        "ReplicasDiffer",
        "peers of stage {stage} make different things of one microbatch: {distance:.2f} apart",
    )
    STAGE_TAKEN_IN = "StageTakenIn", "a peer holds stage {stage} again"
    FINAL_AVERAGING = "FinalAveraging", "training has ended; {peers} peers average a last time"
    TRAINING_PAUSED = "TrainingPaused", "paused; 'loco-peer resume' continues"
    TRAINING_RESUMED = "TrainingResumed", "training resumed after {seconds:.0f} s"
    ROUND_OPENED = "RoundOpened"
    ROUND_CLOSED = "RoundClosed"
    ROUND_LENGTH_CHANGED = "RoundLengthChanged"
    PROPOSAL_SENT = "ProposalSent"
    PROPOSAL_ACCEPTED = "ProposalAccepted"
    PROPOSAL_REFUSED = "ProposalRefused"
    ROUND_AVERAGED = "RoundAveraged"
    ROUND_SKIPPED = "RoundSkipped"
    FRAGMENT_RETURNED = "FragmentReturned"
    TRAINER_STARTED = (
        "TrainerStarted",
        "training {parameters:,} parameters on {device} ({precision})",
    )
    TRAINER_DIED = "TrainerDied", "the trainer died and is being restarted: {detail}"
    STEP_CHOSEN = "StepChosen", "{detail}"
    CODEC_CHOSEN = "CodecChosen"
    VALIDATED = "Validated"
    DOMAIN_VALIDATED = "DomainValidated"
    DIRECTORY_RESTARTED = "DirectoryRestarted", "the directory was restarted: {reason}"
    NETWORK_RESTARTED = "NetworkRestarted", "the network was restarted: {reason}"
    STREAM_FAILED = (
        "StreamFailed",
        "a bug in loco-peer ended a stream of {remote}: {error}: {detail}",
    )
    REQUEST_FAILED = (
        "RequestFailed",
        "a bug in loco-peer ended the request {request}: {error}: {detail}",
    )
    BOOTSTRAP_FAILING = "BootstrapFailing"
    IDENTITY_PINNED = "IdentityPinned", "from now on, {address} must be {multiaddr}"
    RUN_FINISHED = "RunFinished", "the run has ended: held-out loss {validation_loss}"
    RUN_EXPORTED = "RunExported", "exported the model to {path}"
    NOTICE_FAILED = "NoticeFailed", "nobody could be told what is wrong: {detail}"
    TRACKING_FAILED = "TrackingFailed", "{sink} takes no points: {detail}"
    EXPORT_FAILED = "ExportFailed", "the model was not exported: {detail}"
    LEAVING = "Leaving", "leaving"
