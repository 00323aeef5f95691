import pytest

from demo.folder import MARKER, FolderRefused, demo_folder


def test_a_new_folder_is_made_and_marked(tmp_path):
    with demo_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / MARKER).is_file()


def test_what_a_demo_left_is_cleared(tmp_path):
    with demo_folder(tmp_path):
        (tmp_path / "home" / "log").mkdir(parents=True)
        (tmp_path / "summary.json").write_text("{}")
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (tmp_path / "link").symlink_to(outside)
    with demo_folder(tmp_path):
        assert [entry.name for entry in tmp_path.iterdir()] == [MARKER]
    assert (outside / "kept").exists()


def test_what_no_demo_made_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FolderRefused, match="no demo made"), demo_folder(tmp_path):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_one_demo_at_a_time(tmp_path):
    with (
        demo_folder(tmp_path),
        pytest.raises(FolderRefused, match="another demo"),
        demo_folder(tmp_path),
    ):
        pass


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FolderRefused, match="cannot use"), demo_folder(tmp_path / "file"):
        pass


def test_an_error_inside_is_not_the_folders(tmp_path):
    with pytest.raises(PermissionError), demo_folder(tmp_path):
        raise PermissionError
