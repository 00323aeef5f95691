"""Who was there is remembered over a restart; a damaged file is as good as none."""

import pytest

from peer.state.kept_files import MAX_KEPT, Acquaintances
from protocol.membership.view import Member


def test_who_was_there_is_remembered(tmp_path):
    path = tmp_path / "neighbours.json"
    kept = Acquaintances(path)
    assert kept.read() == {}
    kept.keep([Member("a", 1, ("/ip4/1.2.3.4/tcp/1",)), Member("b", 1)])
    assert Acquaintances(path).read() == {"a": ("/ip4/1.2.3.4/tcp/1",)}
    kept.keep([])  # alone: those that were there are remembered
    assert Acquaintances(path).read() == {"a": ("/ip4/1.2.3.4/tcp/1",)}
    kept.keep([Member("c", 1, ("/ip4/1.2.3.4/tcp/2",))])
    assert Acquaintances(path).read().keys() == {"c"}


def test_only_so_many_are_kept(tmp_path):
    kept = Acquaintances(tmp_path / "neighbours.json")
    kept.keep([Member(str(number), 1, ("/ip4/1.2.3.4/tcp/1",)) for number in range(2 * MAX_KEPT)])
    assert len(kept.read()) == MAX_KEPT


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 3}', "{", "\ufffd", "null"])
def test_a_damaged_file_is_as_good_as_none(tmp_path, text):
    path = tmp_path / "neighbours.json"
    path.write_text(text)
    assert Acquaintances(path).read() == {}
