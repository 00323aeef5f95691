"""A real swarm as it is watched: by `top` in a terminal, by the page over HTTP and in a browser."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from swarm import COMMAND, START_S, WAIT_S, Peer, wait_until

from protocol.names import short_id
from protocol.trainer_messages import TrainerTime

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
TOKEN = "0123456789abcdef"
LONG_S = 10.0
SLACK = 0.03
"""A trainer tells of its time every 0.2 s."""


def page_of(peer: Peer) -> str:
    metrics: str = peer.ready()["metrics"]
    return metrics.removesuffix("metrics")


def fetched(url: str, **headers: str) -> bytes:
    asked = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(asked, timeout=10) as answer:
        body: bytes = answer.read()
    return body


def test_the_page_tells_of_the_swarm_and_its_history(swarm):
    one, other = swarm.at_least(2)[:2]

    def seen() -> Any:
        told = json.loads(fetched(page_of(one) + "status.json"))
        here = {peer["peer_id"]: peer for peer in told["peers"]}.get(other.peer_id, {})
        return told if here.get("averages") and len(told["history"]["up_s"]) > 2 else None

    told = wait_until(
        seen, "a history, and averages with the other", timeout_s=START_S, peers=[one]
    )
    assert told["history"]["peers_loss"][-1] is not None
    assert any(rate for rate in told["history"]["received_bytes_per_s"])
    assert told["seconds"]["train"] > 0
    assert told["seconds"]["encode"] > 0
    assert any("linked with" in line for line in told["log"])
    assert "history" not in json.loads(fetched(page_of(one) + "now.json"))
    assert b"<title>" in fetched(page_of(one))
    for name in ("page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css"):
        assert fetched(page_of(one) + name)


@pytest.mark.long
def test_the_parts_of_the_trainers_time_add_up(swarm):
    peer = swarm.at_least(2)[0]
    peer.wait_averaging()
    before = peer.status()

    def apart() -> float:
        """How far the sum of the parts is from the time that has passed; 1 before it is long."""
        now = peer.status()
        passed_s = now["up_s"] - before["up_s"]
        spent_s = sum(now["seconds"][into] - before["seconds"][into] for into in TrainerTime)
        return abs(spent_s - passed_s) / passed_s if passed_s > LONG_S else 1.0

    wait_until(lambda: apart() < SLACK, "parts that add up to it", timeout_s=START_S, peers=[peer])


class Terminal:
    """`loco-peer top` on a terminal of its own, 80 columns and 24 lines."""

    def __init__(self, peer: Peer, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self._ours, False)
        self.said = ""
        self.process = subprocess.Popen(
            [str(COMMAND), "top", "--home", str(peer.home.root)],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(theirs)

    def has_said(self, *words: str) -> bool:
        try:
            while more := os.read(self._ours, 1 << 16):
                self.said += more.decode(errors="replace")
        except (BlockingIOError, OSError):
            pass
        return all(word in self.said for word in words)

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._ours)


def is_grey(colour: int) -> bool:
    """Whether one of 256 colours of a terminal is black, white or between."""
    return colour in (0, 7, 8, 15, 16, 231) or colour >= 232


def test_top_shows_a_live_peer_without_colours_and_quits(swarm):
    one, other = swarm.at_least(2)[:2]
    terminal = Terminal(one, NO_COLOR="1")
    try:
        here = (f"{short_id(one.peer_id)} in run", short_id(other.peer_id), "held-out")
        wait_until(lambda: terminal.has_said(*here), "the section of the swarm", timeout_s=START_S)
        terminal.press("4")
        wait_until(lambda: terminal.has_said("share of the time"), "the section of rounds")
        painted = re.findall(r"[34]8;5;(\d+)", terminal.said)
        assert [colour for colour in painted if not is_grey(int(colour))] == []
        assert not re.search(r"\x1b\[[0-9;]*?[34]8;2;|\x1b\[[34][1-6]m", terminal.said)
        terminal.press("q")
        wait_until(lambda: terminal.has_said() or terminal.process.poll() is not None, "its end")
        assert terminal.process.wait(WAIT_S) == 0
    finally:
        terminal.close()


# --- in a browser ---------------------------------------------------------------------------------

HOSTILE = '<img src="x" onerror="document.title=1"><script>document.title=2</script>'


@pytest.mark.long
def test_a_browser_shows_the_swarm_asks_nobody_else_and_says_when_the_daemon_is_gone(
    swarm, browser
):
    founder = swarm.at_least(2)[0]
    peer = _joined(swarm, founder)
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    site = page_of(peer)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        fetched(site)
    page.goto(f"{site}?token={TOKEN}")
    assert page.url == site, "the token is not in the address any more"
    page.get_by_text(short_id(founder.peer_id)).first.wait_for(timeout=1e3 * START_S)
    page.get_by_text("left, until").wait_for(timeout=1e3 * START_S)
    page.get_by_text("cost of this machine").wait_for()
    assert page.locator("canvas").count() == 4
    says = f"{short_id(peer.peer_id)} says: "
    page.locator("#map title", has_text=says).first.wait_for(state="attached")
    assert [url for url in asked if not url.startswith(site)] == []
    assert complaints == []
    assert _as_peers_would_have_it(page)
    peer.process.kill()
    page.get_by_text("The daemon has not answered for").wait_for(timeout=1e3 * WAIT_S)


def _joined(swarm, founder) -> Peer:
    arguments = ("--metrics-token", TOKEN, "--price-per-hour", "0.5")
    peer: Peer = swarm.launch("watched", "join", "--bootstrap", founder.address, *arguments)
    peer.wait_averaging()
    return peer


def _as_peers_would_have_it(page: Any) -> bool:
    """Whether what looks like markup in the words of others stands there as text."""

    def answer(route: Any) -> None:
        told = route.fetch().json()
        wrong = [{"name": "x", "words": HOSTILE, "help": HOSTILE}]
        for peer in told["peers"]:
            peer["state"] = peer["peer_id"] = HOSTILE
        told["pairs"]["peers"] = [HOSTILE for _ in told["pairs"]["peers"]]
        experts = {"losses": [[1.0]], "together": [None], "gains": [None], "advice": [HOSTILE] * 2}
        told["matrix"] = {"names": [HOSTILE], **experts}
        told |= {"log": [HOSTILE], "doing": HOSTILE, "problems": wrong}
        route.fulfill(json=told)

    page.route("**/*.json", answer)
    page.get_by_text("onerror").first.wait_for()
    time.sleep(1)
    page.unroute("**/*.json")
    return page.locator("img, script:not([src])").count() == 0 and "loco-peer" in page.title()
