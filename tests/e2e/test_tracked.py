"""Real peers draw their curves for TensorBoard, whatever another library does."""

import os
import signal

import pytest
from swarm import INNER_STEPS, RUN_SPEC, START_S, Peer, ending, open_swarm, wait_until

from peer.observe.event_names import EventName
from peer.observe.tracking import POINT_EVERY_S
from protocol.names import short_id

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]
READER = "tensorboard.backend.event_processing.event_multiplexer"
HANGS = (
    "import pathlib, time; pathlib.Path(__file__).with_suffix('.hangs').touch(); time.sleep(1e6)"
)
SHORT_ROUNDS = RUN_SPEC.replace(f"inner_steps = {INNER_STEPS}", "inner_steps = 10")


def test_curves_of_two_peers_go_on_after_a_restart_and_nobody_waits_for_a_library_that_hangs(
    tmp_path_factory,
):
    reader = pytest.importorskip(READER)
    sick = tmp_path_factory.mktemp("sick")
    (sick / "trackio.py").write_text(HANGS)
    with open_swarm(tmp_path_factory.mktemp("tracked"), SHORT_ROUNDS) as swarm:
        path = os.pathsep.join([str(sick), *filter(None, [os.environ.get("PYTHONPATH")])])
        tracked = swarm.environment | {
            "PYTHONPATH": path,
            "LOCO_TRACK": "tensorboard trackio",
            "LOCO_NOTIFY": "http://127.0.0.1:9/secret-topic",
        }

        def curve(peer: Peer) -> list[int]:
            """The steps of its points."""
            several = (
                reader.EventMultiplexer().AddRunsFromDirectory(str(swarm.folder("."))).Reload()
            )
            runs = [run for run in several.Runs() if run.endswith(short_id(peer.peer_id))]
            assert len(runs) < 2, runs
            tags = several.Runs()[runs[0]]["scalars"] if runs else ()
            return [each.step for each in several.Scalars(runs[0], "loss/train")] if tags else []

        def has_points(peer: Peer, count: int) -> None:
            wait_until(
                lambda: len(curve(peer)) >= count,
                f"{count} points",
                timeout_s=START_S + 2 * POINT_EVERY_S,
                poll_s=1.0,
                peers=[peer],
            )

        founder = swarm.found(environment=tracked)
        with ending(swarm.join(founder, environment=tracked)) as joiner:
            has_points(founder, 2)
            has_points(joiner, 2)
            assert (sick / "trackio.hangs").exists()
            founder.wait_averaging()
            for process in founder.processes():
                if "peer.observe.sink" in process.cmdline():
                    assert not [name for name in process.environ() if name.startswith("LOCO_")]
            before = curve(founder)
            founder.process.send_signal(signal.SIGTERM)
            assert founder.wait_exit() == 0, "1 where it took longer than its grace"
            again = swarm.launch(founder.name, "start", environment=tracked)
            again.wait_event(EventName.TRAINER_STARTED, START_S)
            has_points(again, len(curve(again)) + 1)
            after = curve(again)
            assert after[: len(before)] == before
            assert after == sorted(set(after)), "no step twice"
            assert again.events(EventName.TRACKING_FAILED) == [], "it hangs for less than HANG_S"
        files = [path for path in swarm.folder(".").rglob("*") if path.is_file()]
        assert not [path for path in files if b"secret-topic" in path.read_bytes()]
