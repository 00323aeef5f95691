"""The console's sentence for each event; events without one are shown with `--verbose` only.

The event log has every event. People want to know which peers come and go, what failed and what to
do; one line every few seconds shows the progress of the run (peer/daemon/progress.py). So events
that happen several times a minute in a healthy run have no sentence here. Nor have those that this
line tells, or that `doing` tells while a peer starts (BootstrapFailing, NeighboursAwaited).

A sentence is a format string over the event's fields; ids in it are short, numbers are rounded.
"""

from collections.abc import Mapping
from typing import Any, Final

from protocol.names import short_id

from .event_names import EventName

SENTENCES: Final[Mapping[EventName, str | None]] = {
    EventName.DAEMON_STARTED: None,
    EventName.PEER_LINKED: "linked with {remote}",
    EventName.PEER_LOST: "lost {remote}: {reason}",
    EventName.PEER_LEFT: "{remote} left",
    EventName.REACHABILITY_CHANGED: "others can dial this peer: {reachable} (router: {nat})",
    EventName.PEER_RULED_ON: "ruling on {remote}: {verdict}",
    EventName.PEER_IGNORED: "ignoring {remote} for some minutes: {fault}",
    EventName.PEER_CONVICTED: "ignoring {remote}, which was proved to have lied",
    EventName.RUN_RECEIVED: "run '{name}' ({run_id}) received from {remote}",
    EventName.RUN_AMENDED: "the run is amended from round {round} on: {keys}",
    EventName.RUN_RESUMED: "continuing from the checkpoint of step {step}{over}",
    EventName.RUN_BEGUN_ANEW: "starting the run again from its seed: {detail}",
    EventName.NEIGHBOURS_AWAITED: None,
    EventName.REFUSED_BY_PEER: "{remote} refuses this peer: {detail}",
    EventName.CHECKPOINT_WRITTEN: "checkpoint of step {step}{over} written",
    EventName.CHECKPOINT_COPIED: None,
    EventName.CHECKPOINT_FAILED: "a checkpoint was not written: {detail}",
    EventName.CHECKPOINT_REFUSED: "the checkpoint {path} cannot be used: {detail}",
    EventName.CHECKPOINT_SET_ASIDE: (
        "the others continue from step {followed_step}; the newer checkpoint of step {step} is"
        " kept as {path}"
    ),
    EventName.ROOM_FOUND_SMALL: "the disk is small for this run: {detail}",
    EventName.GROUP_ENTERED: None,
    EventName.STATE_PROGRESSED: "fetching the state: {share:.0%}, {left_s:.0f} s left",
    EventName.STATE_RECEIVED: "received the state in {seconds:.1f} s",
    EventName.PIECES_AWAITED: None,
    EventName.PIECE_FAILED: None,
    EventName.DISK_REFUSED: "the disk refused piece {piece} of the corpus: {detail}",
    EventName.STAGE_REBUILT: "rebuilt stage {stage} from its neighbours",
    EventName.STAGE_LEFT_OUT: "no peer holds stage {stage}; training continues without it",
    EventName.STAGE_TAKEN_IN: "a peer holds stage {stage} again",
    EventName.FINAL_AVERAGING: "training has ended; {peers} peers average a last time",
    EventName.TRAINING_PAUSED: "paused; 'loco-peer resume' continues",
    EventName.TRAINING_RESUMED: "training resumed after {seconds:.0f} s",
    EventName.ROUND_OPENED: None,
    EventName.ROUND_CLOSED: None,
    EventName.ROUND_LENGTH_CHANGED: None,
    EventName.PROPOSAL_SENT: None,
    EventName.PROPOSAL_ACCEPTED: None,
    EventName.PROPOSAL_REFUSED: None,
    EventName.ROUND_AVERAGED: None,
    EventName.ROUND_SKIPPED: None,
    EventName.FRAGMENT_RETURNED: None,
    EventName.TRAINER_STARTED: "training {parameters:,} parameters on {device} ({precision})",
    EventName.TRAINER_DIED: "the trainer died and is being restarted: {detail}",
    EventName.CODEC_CHOSEN: None,
    EventName.VALIDATED: None,
    EventName.DIRECTORY_RESTARTED: "the directory was restarted: {reason}",
    EventName.NETWORK_RESTARTED: "the network was restarted: {reason}",
    EventName.STREAM_FAILED: "a bug in loco-peer ended a stream of {remote}: {error}: {detail}",
    EventName.REQUEST_FAILED: "a bug in loco-peer ended the request {request}: {error}: {detail}",
    EventName.BOOTSTRAP_FAILING: None,
    EventName.IDENTITY_PINNED: "from now on, {address} must be {multiaddr}",
    EventName.RUN_FINISHED: "the run has ended: held-out loss {validation_loss}",
    EventName.RUN_EXPORTED: "exported the model to {path}",
    EventName.EXPORT_FAILED: "the model was not exported: {detail}",
    EventName.LEAVING: "leaving",
}
"""None: shown with `--verbose` only."""


def said_of(event: Mapping[str, Any]) -> str | None:
    """The sentence for an event; None if the console does not show it."""
    sentence = SENTENCES[EventName(event["event"])]
    if sentence is None:
        return None
    try:
        return sentence.format_map({key: _readable(key, value) for key, value in event.items()})
    except (KeyError, ValueError, TypeError):  # a field is missing, or is no number this time
        fields = (f"{key}={value}" for key, value in event.items() if key not in _STAMPED)
        return " ".join([str(event["event"]), *fields])


_STAMPED: Final = frozenset({"time", "monotonic_s", "peer", "event"})


def _readable(key: str, value: Any) -> Any:
    if key in ("remote", "partner") and isinstance(value, str):
        return short_id(value)
    if key.endswith("loss") and isinstance(value, float):
        return f"{value:.4f}"
    if key == "over":
        return " (the end of the run)" if value else ""
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value)
    return f"{value:,}" if key in ("step", "followed_step") else value
