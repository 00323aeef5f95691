"""Uploads and a restore through an S3 server, which is moto's, on loopback."""

from collections.abc import Iterator

import pytest
from fsspec.core import url_to_fs
from test_restoring import ME, Uploaded, restored_steps

from peer.state.checkpoints import OUTER_FILE
from peer.state.home import Home
from peer.state.uploads import RestoreFailed, restore

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the servers' libraries
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket; the environment says where it is, as a user's would."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "us",
        "AWS_SECRET_ACCESS_KEY": "ours",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    files, _ = url_to_fs("s3://bucket/run")
    files.mkdir("bucket")
    yield "s3://bucket/run"
    type(files).clear_instance_cache()
    server.stop()


def test_what_was_uploaded_is_restored(tmp_path, bucket):
    empty = Home(tmp_path / "empty")
    empty.prepare()
    with pytest.raises(RestoreFailed, match="there is nothing at"):
        list(restore(bucket, empty, 3))
    uploaded = Uploaded(tmp_path, bucket)
    for step in (10, 20, 5):
        uploaded.upload(step, keep=2)
    where = uploaded.upload(30, keep=2)
    files, _ = url_to_fs(bucket)
    steps = {path.rpartition("-")[2] for path in files.ls(f"{bucket}/{ME}") if "-step-" in path}
    assert steps == {"20", "30"}
    files.rm(f"{where}/{OUTER_FILE}")
    said = list(restore(bucket, empty, 3))
    assert restored_steps(empty) == [20]
    assert empty.run() == uploaded.signed
    assert "corpus: whole" in said
