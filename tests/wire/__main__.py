"""Record what this version says to others: `python -m tests.wire`, from a clean checkout.

The homes in tests/homes run for a while, with a newcomer each, and of each peer and type of message
the first is kept. What none of them has said is made up.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "e2e")]

from recorded_homes import RECORDED  # noqa: E402 - pytest puts these folders on the path by itself
from recorded_wire import RecordedWire, Said, rules_of_today  # noqa: E402
from swarm import Peer, Swarm, open_swarm  # noqa: E402

from bench.fuzzing.headers import messages_of  # noqa: E402
from bench.fuzzing.shots import CONVERSATIONS, drawn, messages_in  # noqa: E402
from protocol.wire.messages import encode_message  # noqa: E402
from protocol.wire.versions import SPOKEN  # noqa: E402

LASTS_S = 60.0
MADE_UP = 2
"""Messages of a type that nobody has said."""
TAP = """
import json
from peer.network.conversation import Conversation
from protocol.wire.messages import encode_message
send = Conversation.send
async def tapped(self, message, *payload, **more):
    said = [self._stream._protocol, type(message).__name__, encode_message(message).hex()]
    with open({path!r}, "a") as file:
        file.write(json.dumps(said) + "\\n")
    await send(self, message, *payload, **more)
Conversation.send = tapped
"""


def said_in_runs() -> Iterator[Said]:
    for run in dict.fromkeys(each.name.removesuffix("-a").removesuffix("-b") for each in RECORDED):
        with tempfile.TemporaryDirectory() as folder, open_swarm(Path(folder)) as swarm:
            taps = live(swarm, [f"{run}-{letter}" for letter in "abc"])
            for name, tap in taps.items():
                lines = map(json.loads, tap.read_text().splitlines())
                first = {line[1]: line for line in reversed([*lines])}
                yield from (
                    Said(name, conversation, kind, bytes.fromhex(header))
                    for conversation, kind, header in first.values()
                )


def live(swarm: Swarm, names: list[str]) -> dict[str, Path]:
    """Run peers of these homes until they have said what they say, and leave."""
    taps = {name: swarm.folder(f"{name}.jsonl") for name in names}
    peers = list[Peer]()
    for name, tap in taps.items():
        for each in RECORDED:
            if each.name == name:
                each.unpack(swarm.folder("."))
        site = swarm.with_site(swarm.folder(f"site-{name}"), TAP.format(path=str(tap)))
        how = ("join", "--bootstrap", peers[0].address) if peers else ("start", "--alone")
        peers.append(swarm.launch(name, *how, environment=site))
        peers[-1].ready()
    time.sleep(LASTS_S)
    for peer in reversed(peers):
        peer.process.terminate()
        peer.wait_exit()
    return taps


def made_up(said: set[str]) -> Iterator[Said]:
    for conversation in CONVERSATIONS:
        for kind in messages_in(conversation):
            if kind.__name__ not in said:
                for message in drawn(messages_of(kind), MADE_UP, 0):
                    yield Said("", conversation, kind.__name__, encode_message(message))


def record() -> None:
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    heard = [*said_in_runs()]
    said = (*heard, *made_up({each.kind for each in heard}))
    wire = RecordedWire(version("loco-peer"), commit, SPOKEN, rules_of_today(), said)
    print(wire.write(), f"{len(heard)} messages heard, {len(said) - len(heard)} made up")


record()
