"""A cloud says through its metadata service that it takes the machine away."""

import json
from http import HTTPStatus

import pytest
import trio
from metadata_service import Answer, metadata_service

from peer.options.values import METADATA, Cloud, HostPort, Notices, notices
from peer.process.notices import ASK_EVERY_S, is_taken_away, until_taken_away

TOKEN = "secret"


def of_aws(*, taken: bool) -> Answer:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if (method, path) == ("PUT", "/latest/api/token"):
            lasts = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            return (HTTPStatus.OK, TOKEN.encode()) if lasts.isdigit() else (400, b"")
        if headers.get("x-aws-ec2-metadata-token") != TOKEN:
            return HTTPStatus.UNAUTHORIZED, b""
        known = path == "/latest/meta-data/spot/instance-action" and taken
        return (200, b'{"action": "terminate"}') if known else (404, b"")

    return answer


def of_gcp(*, taken: bool) -> Answer:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if headers.get("metadata-flavor") != "Google":
            return HTTPStatus.FORBIDDEN, b"TRUE"
        return 200, b"TRUE\n" if taken else b"FALSE\n"

    return answer


def of_azure(*, taken: bool) -> Answer:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if headers.get("metadata") != "true" or "api-version=" not in path:
            return 400, b"{}"
        kinds = ["Reboot", *(["Preempt"] if taken else [])]
        return 200, json.dumps({"Events": [{"EventType": kind} for kind in kinds]}).encode()

    return answer


CLOUDS = {Cloud.AWS: of_aws, Cloud.GCP: of_gcp, Cloud.AZURE: of_azure}


@pytest.mark.parametrize("cloud", CLOUDS)
async def test_a_notice_is_heard_and_nothing_else(cloud: Cloud) -> None:
    for taken in (False, True):
        with metadata_service(CLOUDS[cloud](taken=taken)) as where:
            assert await is_taken_away(Notices(cloud, where)) is taken


@pytest.mark.parametrize("cloud", CLOUDS)
async def test_what_is_no_answer_of_theirs_takes_nobody_away(cloud: Cloud) -> None:
    for status, body in (
        (500, b"TRUE?"),
        (404, b"<html>"),
        (200 if cloud != Cloud.AWS else 404, b""),
    ):
        with metadata_service(lambda *_, told=(status, body): told) as where:
            assert await is_taken_away(Notices(cloud, where)) is False


async def test_a_service_that_does_not_answer_is_said_once_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    answers: list[bool | None] = [None, None, False, True]

    async def asked(_: Notices) -> bool:
        answer = answers.pop(0)
        if answer is None:
            raise OSError("no route")
        return answer

    monkeypatch.setattr("peer.process.notices.is_taken_away", asked)
    said: list[str] = []
    await until_taken_away(Notices(Cloud.AWS, METADATA), said.append)
    assert said == [f"{METADATA}: no route"]
    assert trio.current_time() == 3 * ASK_EVERY_S


async def test_nobody_listens_there() -> None:
    with metadata_service(of_gcp(taken=False)) as where:
        pass
    with pytest.raises(OSError, match="refused"):
        await is_taken_away(Notices(Cloud.GCP, where))


def test_the_option_names_a_cloud_and_perhaps_where() -> None:
    assert notices("gcp") == Notices(Cloud.GCP, METADATA)
    elsewhere = notices("aws@[fd00:ec2::254]:80")
    assert elsewhere.where == HostPort("fd00:ec2::254", 80)
    for each in ("gcp", str(elsewhere)):
        assert str(notices(each)) == each
    for wrong in ("", "oracle"):
        with pytest.raises(ValueError, match="use 'aws' or 'gcp' or 'azure'"):
            notices(wrong)
