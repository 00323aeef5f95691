"""Messages of what is wrong: when they are due, what they look like, and that they arrive."""

import json
import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from loopback_service import Service, open_service

from peer.observe.notify import (
    LOOK_S,
    MAX_CHARS,
    SETTLE_S,
    Notifications,
    message_of,
    request_of,
    tell_problems,
)
from peer.observe.problems import PeerProblem, help_of
from peer.options.config import ConfigError, load_config
from peer.process.rejoin import handed_on, rejoin_command


def problem(name: str, words: str = "it has figures") -> PeerProblem:
    return PeerProblem(name, words, help_of(name))


SPLIT, ALONE = problem("split"), problem("alone")


def test_each_problem_is_told_once_when_it_has_settled_and_once_when_it_is_over() -> None:
    notices = Notifications()
    assert notices.due(0.0, [SPLIT]) == ([], [])
    assert notices.due(SETTLE_S - 1, [SPLIT, ALONE]) == ([], [])
    newest = problem("split", "it has other figures")
    assert notices.due(SETTLE_S, [newest, ALONE]) == ([newest], [])
    assert notices.due(SETTLE_S, [newest, ALONE]) == ([newest], []), "nobody has taken it"
    notices.mark_told([newest], [])
    assert notices.due(SETTLE_S + 1, [newest]) == ([], [])
    assert notices.due(2 * SETTLE_S, []) == ([], []), "over for a moment, perhaps"
    assert notices.due(2 * SETTLE_S + 1, [SPLIT]) == ([], [])
    assert notices.due(4 * SETTLE_S, []) == ([], [])
    assert notices.due(5 * SETTLE_S, []) == ([], [newest])
    notices.mark_told([], [newest])
    assert notices.due(9 * SETTLE_S, []) == ([], [])


def test_what_comes_and_goes_is_never_told() -> None:
    notices = Notifications()
    for second in range(600):
        assert notices.due(second, [SPLIT] if second % 50 < 40 else []) == ([], [])


def test_each_service_is_spoken_to_as_it_wants() -> None:
    message = message_of("me & <you>", [SPLIT], [ALONE])
    assert message == (
        "me & <you>\nwrong: it has figures (docs/troubleshooting.md#split)\nover: alone"
    )
    ntfy = request_of("https://ntfy.sh/topic", message)
    assert (ntfy.method, ntfy.data) == ("POST", message.encode())
    discord = request_of("https://discord.com/api/webhooks/1/a", message)
    assert json.loads(bytes(discord.data or b"")) == {  # type: ignore[arg-type]
        "content": message,
        "allowed_mentions": {"parse": []},
    }
    slack = request_of("https://hooks.slack.com/services/T/B/x", message)
    said = json.loads(bytes(slack.data or b""))["text"]  # type: ignore[arg-type]
    assert said.startswith("me &amp; &lt;you&gt;\n"), "nobody is mentioned by what peers say"
    assert len(message_of("me", [problem("split", "x" * 9999)], [])) == MAX_CHARS


def test_the_url_is_checked_and_shown_to_nobody(tmp_path) -> None:
    file, url = tmp_path / "url", "https://ntfy.sh/secret-topic"
    file.write_text(f"{url}\n")
    for given in (url, f"@{file}"):
        config = load_config({"home": tmp_path, "notify": given}, {})
        assert config.notify == url
        assert "secret-topic" not in "".join([*config.describe(), *rejoin_command(config)])
        assert handed_on(config) == {"LOCO_NOTIFY": url}, "a peer that joins again goes on telling"
    config = load_config({"home": tmp_path}, {"LOCO_NOTIFY": url})
    assert (config.notify, handed_on(config)) == (url, {})
    for bad in (
        "ntfy.sh/secret-topic",
        "file:///secret-topic",
        "https:///secret-topic",
        "https://a b",
    ):
        with pytest.raises(ConfigError, match="use https://") as refused:
            load_config({"home": tmp_path}, {"LOCO_NOTIFY": bad})
        assert "secret-topic" not in str(refused.value)


# --- a real server --------------------------------------------------------------------------------


@pytest.fixture
def service() -> Iterator[Service]:
    with open_service(500, 302) as service:
        yield service


async def until(clock: trio.testing.MockClock, server: Service, count: int) -> None:
    """Let virtual time pass, and real time while a message is on its way."""
    with trio.fail_after(10**6):
        while len(server.got) < count:
            clock.jump(LOOK_S)
            await trio.to_thread.run_sync(threading.Event().wait, 0.01)


async def test_a_service_is_told_though_it_fails_at_first(service: Service, mock_clock) -> None:
    wrong, why = [SPLIT], list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_problems, service.url, lambda: wrong, lambda: "me", why.append)
        await until(mock_clock, service, 3)
        wrong.clear()
        await until(mock_clock, service, 4)
        nursery.cancel_scope.cancel()
    assert [body for _, body in service.got] == [
        "500",
        "302",
        "me\nwrong: it has figures (docs/troubleshooting.md#split)",
        "me\nover: split",
    ]
    assert {path for path, _ in service.got} == {"/secret-topic"}
    assert why == ["HTTP status 500", "HTTP status 302"]


async def test_whatever_goes_wrong_ends_there(mock_clock) -> None:
    tries = ["no server", "no list"]
    why = list[str]()

    def problems() -> list[PeerProblem]:
        if len(why) == 1:
            raise AssertionError("secret-topic")
        return [SPLIT]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            tell_problems, "http://127.0.0.1:9/secret-topic", problems, lambda: "me", why.append
        )
        while len(why) < len(tries):
            mock_clock.jump(LOOK_S)
            await trio.to_thread.run_sync(threading.Event().wait, 0.01)
        nursery.cancel_scope.cancel()
    assert "refused" in why[0]
    assert why[1] == "AssertionError"
