"""`loco-peer invite`, `admit`, `ban`, `delegate`, and what they answer to wrong input."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from peer.cli.app import app
from peer.cli.client import duration_s
from peer.options.config import ConfigError, load_config
from peer.options.exit_codes import ExitCode
from protocol.admission.statements import Token

PEER = "12D3KooWEC9aiTnm17ZpGvxQDHoxnTyZ8LecyEC3QhcfNr3Qs4Ur"


def token_text():
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    public = key.public_key().public_bytes_raw()
    return Token.made("ab" * 16, 1, 1, seed=b"s" * 32, signer=public, sign=key.sign).text


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600)]
)
def test_times_are_written_as_people_do(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "7 d", "7y", "1.5h", "9999w"])
def test_what_is_no_time_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="7d"):
        duration_s(text)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["invite", "--expires", "soon"], "--expires: use a whole number"),
        (["invite", "--uses", "0"], "--uses: must be from 1"),
        (["ban", "some body"], "`loco-peer status` shows a peer's own id"),
        (["ban", PEER[:-3]], "`loco-peer status` shows a peer's own id"),
    ],
)
def test_wrong_usage_is_said(tmp_path, command, told):
    ran = CliRunner().invoke(app, [*command, "--home", str(tmp_path)])
    assert ran.exit_code == ExitCode.USAGE
    assert told in ran.output


@pytest.mark.parametrize(
    "command", [["invite"], ["ban", PEER], ["admit", PEER], ["delegate", PEER], ["ban", PEER[-8:]]]
)
def test_without_a_daemon_there_is_nobody_to_ask(tmp_path, command):
    ran = CliRunner().invoke(app, [*command, "--home", str(tmp_path)])
    assert ran.exit_code == ExitCode.NO_DAEMON
    assert "no daemon is running" in ran.output


def test_an_invitation_is_shown_to_nobody(tmp_path):
    text = token_text()
    config = load_config({"home": tmp_path}, {"LOCO_INVITE": text})
    assert config.invite == Token.parse(text)
    assert "invite = (given) (environment)" in config.describe()
    assert text not in "\n".join([*config.describe(), repr(config)])
    with pytest.raises(ConfigError) as refused:
        load_config({"home": tmp_path, "invite": text[:-5]}, {})
    assert "damaged invitation" in str(refused.value)
    assert text[:-5] not in str(refused.value)


def test_an_invitation_may_stand_in_a_file(tmp_path):
    text, file = token_text(), tmp_path / "invitation"
    file.write_text(f"{text}\n")
    for given, environment in (({"invite": f"@{file}"}, {}), ({}, {"LOCO_INVITE": f"@{file}"})):
        config = load_config({"home": tmp_path} | given, environment)
        assert config.invite == Token.parse(text)
    file.unlink()
    with pytest.raises(ConfigError, match=f"cannot read {file}: No such file"):
        load_config({"home": tmp_path, "invite": f"@{file}"}, {})
