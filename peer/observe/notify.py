"""Messages of what is wrong (`--notify`): one when it is new, and one when it is over.

Each is a POST to the user's URL: a topic of ntfy, or a webhook of Slack or Discord, which are known
by their paths. What comes and goes within SETTLE_S is not told. All that is due goes in one
message; one that failed is tried again, ever more seldom. Whatever goes wrong here ends here.
"""

import html
import json
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import trio

from protocol.limits import ANSWER_S

from .problems import PeerProblem

SETTLE_S: Final = 60.0
LOOK_S: Final = 5.0
MAX_PAUSE_S: Final = 3600.0
"""Between two tries, when nobody takes the message."""
MAX_CHARS: Final = 1900
"""Discord takes 2000, ntfy 4096 bytes."""


class Notifications:
    """The difference between what was told and what has settled since."""

    def __init__(self) -> None:
        self._told: dict[str, PeerProblem] = {}
        self._since_s: dict[str, float] = {}
        self._now: dict[str, PeerProblem] = {}

    def due(
        self, now_s: float, problems: Sequence[PeerProblem]
    ) -> tuple[list[PeerProblem], list[PeerProblem]]:
        """Problems that are new, and those that are over, which were not told yet."""
        self._now = {problem.name: problem for problem in problems}
        changed = self._now.keys() ^ self._told.keys()
        self._since_s = {name: self._since_s.get(name, now_s) for name in changed}
        settled = {name for name, since_s in self._since_s.items() if now_s - since_s >= SETTLE_S}
        new = [problem for name, problem in self._now.items() if name in settled]
        return new, [problem for name, problem in self._told.items() if name in settled]

    def mark_told(self, new: Sequence[PeerProblem], over: Sequence[PeerProblem]) -> None:
        self._told |= {problem.name: problem for problem in new}
        for problem in over:
            del self._told[problem.name]


def message_of(who: str, new: Sequence[PeerProblem], over: Sequence[PeerProblem]) -> str:
    lines = [f"wrong: {problem.line}" for problem in new]
    lines += [f"over: {problem.name}" for problem in over]
    return "\n".join([who, *lines])[:MAX_CHARS]


def request_of(url: str, message: str) -> Request:
    """The POST, as the service takes it."""
    path, kind = urlsplit(url).path, "application/json"
    if path.startswith("/api/webhooks/"):  # of Discord
        body = json.dumps({"content": message, "allowed_mentions": {"parse": []}})
    elif path.startswith(("/services/", "/hooks/")):  # of Slack, and of Mattermost
        body = json.dumps({"text": html.escape(message, quote=False)})
    else:
        body, kind = message, "text/plain; charset=utf-8"
    headers = {"Content-Type": kind, "User-Agent": "loco-peer"}
    return Request(url, body.encode(), headers, method="POST")  # noqa: S310 - checked where it was given


class _NoRedirect(HTTPRedirectHandler):
    """A POST that is sent elsewhere would arrive without its body, or at somebody else's."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(request: Request) -> None:
    try:
        with build_opener(_NoRedirect).open(request, timeout=ANSWER_S):
            pass
    except HTTPError as error:
        with error:  # it holds the connection
            raise


async def tell_problems(
    url: str,
    problems: Callable[[], Sequence[PeerProblem]],
    who: Callable[[], str],
    failed: Callable[[str], None],
) -> None:
    """Tell, until cancelled.

    Args:
        who: begins each message.
        failed: is told why nobody took a message, without the URL, which is a secret.
    """
    notices, pause_s = Notifications(), LOOK_S
    one_thread = trio.CapacityLimiter(1)  # of its own: one that hangs holds up nothing else
    while True:
        await trio.sleep(pause_s)
        try:
            new, over = notices.due(trio.current_time(), problems())
            if new or over:
                request = request_of(url, message_of(who(), new, over))
                await trio.to_thread.run_sync(
                    _post, request, abandon_on_cancel=True, limiter=one_thread
                )
                notices.mark_told(new, over)
        except Exception as error:  # noqa: BLE001 - a message that fails must not end the peer
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            failed(_why(error))
        else:
            pause_s = LOOK_S


def _why(error: Exception) -> str:
    """Only what cannot hold the URL, nor words of the server."""
    if isinstance(error, HTTPError):
        return f"HTTP status {error.code}"
    return str(error) if isinstance(error, OSError) else type(error).__name__
