"""What is wrong is refused with a sentence and an exit code, and nobody else is harmed."""

import shutil
import sys
from pathlib import Path

import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm, all_averaging, ending, free_port, wait_until

from peer.facts import PeerState
from peer.network.identity import Identity
from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode
from peer.state.home import Home
from protocol.run.run_spec import DataSection, RunSpec
from protocol.run.signed_spec import SignedSpec

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def refused(peer: Peer, code: ExitCode, *sentences: str) -> None:
    """It ends by itself, with this code, and says why in one line."""
    with ending(peer):
        assert peer.wait_exit(START_S) == code, peer.report()
        last = peer.stderr.splitlines()[-1]
        for sentence in sentences:
            assert sentence in last, peer.report()
        assert "Traceback" not in peer.stderr


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[model]\nhiden_size = 64\n", "did you mean 'hidden_size'?"),
        ("[model]\nhidden_size = 30\nnum_heads = 4\n", "must be a multiple of 2 * num_heads"),
        ("[sync]\ngamma = 2.0\n", "diverges"),
        ("[data]\nsource = 'text:nothing/here/*.txt'\n", "nothing/here"),
        ("= = =", "not TOML"),
    ],
)
def test_a_wrong_run_spec_is_refused(swarm: Swarm, text: str, sentence: str) -> None:
    spec = swarm.folder("wrong.toml")
    spec.write_text(text)
    refused(swarm.launch("wrong", "start", str(spec)), ExitCode.USAGE, sentence)


def test_the_home_of_another_run_is_refused(swarm: Swarm) -> None:
    (member, *_) = swarm.at_least(1)
    home = Home(swarm.folder("other"))
    home.prepare()
    founder = Identity(bytes(32))
    spec = RunSpec(data=DataSection(manifest="1" * 64, tokenizer_digest="2" * 64))
    home.bind_run(SignedSpec.signed_by(spec, founder.public_key, founder.sign))
    before = home.run_path.read_bytes()
    refused(swarm.join(member, "other"), ExitCode.USAGE, "belongs to run", "home of its own")
    assert home.run_path.read_bytes() == before
    assert member.running


def test_a_run_that_takes_more_than_half_of_the_machine_is_not_joined_unasked(
    swarm: Swarm,
) -> None:
    spec = swarm.folder("large.toml")
    spec.write_text(RUN_SPEC)
    prefix = [sys.executable, str(Path(__file__).with_name("hostile_founder.py"))]
    with ending(swarm.launch("large", "start", str(spec), prefix=prefix)) as founder:
        founder.wait_event(EventName.ROUND_OPENED, START_S)
        joiner = swarm.join(founder, "asked")
        # It is asked, or no checkpoint fits.
        refused(joiner, ExitCode.USAGE, "may take")
        assert "  model   16.2B parameters" in joiner.stderr
        assert "an hour each way" in joiner.stderr
        assert not joiner.home.run()
        assert not list(joiner.home.cache_dir.glob("corpus-*"))


def test_a_home_that_cannot_be_used_is_refused(swarm: Swarm) -> None:
    swarm.folder("plain-file").write_text("not a folder")
    done = swarm.loco("join", "--bootstrap", "h:1", "--home", str(swarm.folder("plain-file")))
    assert done.returncode == ExitCode.USAGE
    assert "plain-file cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_bootstrap_is_named_with_its_cause_until_it_is_there(swarm: Swarm) -> None:
    (member, *_) = swarm.at_least(1)
    port = free_port()
    address = f"127.0.0.1:{port}"
    with ending(swarm.join(address)) as waiting:
        failing = waiting.wait_event(EventName.BOOTSTRAP_FAILING, START_S)
        assert (failing["address"], failing["step"]) == (address, "dial")
        assert failing["detail"].endswith("Connection refused")
        assert "check the port" in failing["cure"]
        said = f"{address}: "
        wait_until(lambda: said in waiting.stderr, "the console names the address", peers=[waiting])
        assert failing["cure"] in waiting.stderr
        status = waiting.status()
        assert status["state"] == PeerState.CONNECTING
        assert address in status["doing"]
        assert failing["cure"] in status["doing"]
        with ending(swarm.join(member, listen=address)) as late:
            late.ready()
            received = waiting.wait_event(EventName.RUN_RECEIVED, START_S)
            assert received["remote"] == late.peer_id
            waiting.wait_averaging()


def test_a_host_that_speaks_something_else_is_named(swarm: Swarm) -> None:
    (member, *_) = swarm.at_least(1)
    metrics = member.ready()["metrics"].removeprefix("http://").removesuffix("/metrics")
    nowhere = "no.such.name.invalid:1"
    with ending(swarm.join(metrics)) as one, ending(swarm.join(nowhere)) as other:
        for lost, address, step in ((one, metrics, "protocol"), (other, nowhere, "resolve")):
            said = lost.wait_event(EventName.BOOTSTRAP_FAILING, START_S)
            assert (said["address"], said["step"]) == (address, step)
            assert said["cure"]
            assert lost.running


@pytest.mark.long
def test_one_identity_runs_once(swarm: Swarm) -> None:
    first, *others = reversed(swarm.at_least(2))
    via = others[0]
    copy = swarm.folder("copy")
    shutil.copytree(first.home.root, copy)
    refused(
        swarm.join(via, "copy"),
        ExitCode.REFUSED,
        f"{first.peer_id} is alive elsewhere",
        "Use another --home here",
    )
    first.wait_averaging()
    first.kill()
    with ending(swarm.join(via, "copy")) as second:
        second.wait_averaging()
        assert second.peer_id == first.peer_id
        assert not second.events(EventName.BOOTSTRAP_FAILING)
        all_averaging(others)
