"""A run for invited peers, as its people live it: refused, invited, back again, banned."""

import pytest
from swarm import RUN_SPEC, START_S, open_swarm

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PRIVATE = f"""{RUN_SPEC}
[admission]
mode = "invite"
"""


def test_strangers_are_refused_guests_train_and_the_banned_end(tmp_path):
    with open_swarm(tmp_path, PRIVATE) as swarm:
        founder = swarm.found()
        stranger = swarm.join(founder, "stranger")
        assert stranger.wait_exit(START_S) == ExitCode.REFUSED
        assert "takes invited peers alone" in stranger.stderr
        assert founder.status()["run_id"] not in stranger.stderr

        home = str(founder.home.root)
        line = swarm.loco("invite", "--home", home, "--expires", "1h").stdout
        invited = swarm.environment | dict([line.split()[0].split("=", 1)])
        guest = swarm.join(founder, "guest", environment=invited)
        guest.wait_averaging()
        assert "ruling on " in guest.stderr  # it knows who may be here

        guest.kill()
        guest = swarm.join(founder, "guest")  # its home has kept what the invitation was for
        guest.wait_averaging()

        told = swarm.loco("ban", guest.peer_id, "--home", str(guest.home.root))
        assert (told.returncode, "may not sign" in told.stderr) == (ExitCode.FAILURE, True)
        done = swarm.loco("ban", guest.peer_id[-8:], "--home", home)
        assert (done.returncode, done.stdout) == (ExitCode.OK, f"banned {guest.peer_id}\n")
        assert guest.wait_exit() == ExitCode.REFUSED
        assert "banned" in guest.stderr
        founder.wait_event(EventName.PEER_LOST, remote=guest.peer_id)
        assert founder.running
