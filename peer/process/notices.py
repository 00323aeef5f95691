"""Notices of a cloud that takes its machine away: a peer that hears one leaves in time.

Each cloud tells the machine itself, and nobody else, through its metadata service. AWS says it two
minutes before, GCP 30 seconds, Azure in an event that names the time. Nothing answers for years,
and an answer is short, so it is asked in a thread, and every few seconds.

A service that does not answer takes nobody away: it is asked again.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final

import trio

from peer.options.values import Cloud, HostPort, Notices
from protocol.limits import MAX_SPEC_BYTES

ASK_EVERY_S: Final = 5.0
CLOUD_ANSWER_S: Final = 2.0
Ask = Callable[[str, str, Mapping[str, str]], tuple[int, bytes]]
"""Method, path and headers to the status and the body. Raises OSError."""


def _aws(ask: Ask) -> bool:
    lasts = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    _, token = ask("PUT", "/latest/api/token", lasts)
    given = {"X-aws-ec2-metadata-token": token.decode(errors="replace").strip()}
    status, _ = ask("GET", "/latest/meta-data/spot/instance-action", given)
    return status == HTTPStatus.OK


def _gcp(ask: Ask) -> bool:
    path = "/computeMetadata/v1/instance/preempted"
    _, body = ask("GET", path, {"Metadata-Flavor": "Google"})
    return body.strip() == b"TRUE"


def _azure(ask: Ask) -> bool:
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    _, body = ask("GET", path, {"Metadata": "true"})
    try:
        return any(event["EventType"] == "Preempt" for event in json.loads(body)["Events"])
    except (ValueError, KeyError, TypeError):
        return False


ASKED: Final[Mapping[Cloud, Callable[[Ask], bool]]] = {
    Cloud.AWS: _aws,
    Cloud.GCP: _gcp,
    Cloud.AZURE: _azure,
}


def _ask(where: HostPort, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    from http.client import HTTPConnection, HTTPException  # here: few peers ask

    connection = HTTPConnection(where.host, where.port, timeout=CLOUD_ANSWER_S)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_SPEC_BYTES)
    except HTTPException as error:
        raise OSError(f"no answer of HTTP: {error!r}") from error
    finally:
        connection.close()


async def is_taken_away(notices: Notices) -> bool:
    """Raises OSError: its service does not answer."""
    asked = partial(ASKED[notices.cloud], partial(_ask, notices.where))
    return await trio.to_thread.run_sync(asked, abandon_on_cancel=True)


async def until_taken_away(notices: Notices, tell_silent: Callable[[str], None]) -> None:
    """Return when the machine is taken away; say once that nothing answers."""
    was_told = False
    while True:
        try:
            if await is_taken_away(notices):
                return
        except OSError as error:
            if not was_told:
                tell_silent(f"{notices.where}: {error}")
            was_told = True
        await trio.sleep(ASK_EVERY_S)
