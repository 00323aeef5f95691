"""Our encoding of p2pd's control messages against hivemind's generated one."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.network import p2pd_messages as messages
from peer.network.p2pd_messages import PeerAddresses, RequestType
from protocol.errors import RemoteProtocolError


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    """hivemind's own module of these messages, without the rest of hivemind."""
    spec = importlib.util.find_spec("hivemind")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "proto" / "p2pd_pb2.py"
    module_spec = importlib.util.spec_from_file_location("p2pd_pb2_for_tests", file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def test_requests_are_the_bytes_that_hivemind_would_send(generated: ModuleType) -> None:
    pb = generated
    request = pb.Request
    expected = {
        messages.simple_request(RequestType.IDENTIFY): request(type=request.IDENTIFY),
        messages.simple_request(RequestType.LIST_PEERS): request(type=request.LIST_PEERS),
        messages.simple_request(RequestType.PERSISTENT_CONN_UPGRADE): request(
            type=request.PERSISTENT_CONN_UPGRADE
        ),
        messages.connect_request(b"p", [b"a", b"b" * 300], 15): request(
            type=request.CONNECT,
            connect=pb.ConnectRequest(peer=b"p", addrs=[b"a", b"b" * 300], timeout=15),
        ),
        messages.stream_open_request(b"p", "/x/1", 300): request(
            type=request.STREAM_OPEN,
            streamOpen=pb.StreamOpenRequest(peer=b"p", proto=["/x/1"], timeout=300),
        ),
        messages.stream_handler_request(b"l", "/x/1"): request(
            type=request.STREAM_HANDLER,
            streamHandler=pb.StreamHandlerRequest(addr=b"l", proto=["/x/1"], balanced=False),
        ),
    }
    for ours, theirs in expected.items():
        assert ours == theirs.SerializeToString(deterministic=True)


def test_responses_of_hiveminds_encoding_are_understood(generated: ModuleType) -> None:
    pb = generated
    ok = pb.Response(
        type=pb.Response.OK,
        identify=pb.IdentifyResponse(id=b"me", addrs=[b"a", b"b"]),
        peers=[pb.PeerInfo(id=b"p", addrs=[b"c"]), pb.PeerInfo(id=b"q")],
    )
    parsed = messages.parse_response(ok.SerializeToString())
    assert parsed.error is None
    assert parsed.identity == PeerAddresses(b"me", (b"a", b"b"))
    assert parsed.peers == (PeerAddresses(b"p", (b"c",)), PeerAddresses(b"q", ()))
    failed = pb.Response(type=pb.Response.ERROR, error=pb.ErrorResponse(msg="no way"))
    assert messages.parse_response(failed.SerializeToString()).error == "no way"
    bare = pb.Response(type=pb.Response.ERROR)
    assert messages.parse_response(bare.SerializeToString()).error == "no reason given"
    info = pb.StreamInfo(peer=b"p", addr=b"a", proto="/x/1").SerializeToString()
    assert messages.parse_stream_info(info) == messages.StreamInfo(b"p", b"a", "/x/1")


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_worse(data: bytes) -> None:
    for parse in (messages.parse_response, messages.parse_stream_info):
        try:
            parse(data)
        except RemoteProtocolError:
            continue


@pytest.mark.slow
def test_nothing_of_hivemind_or_protobuf_is_imported() -> None:
    script = (
        "import sys, peer.network.libp2p, peer.network.tls_probe;"
        "print([m for m in ('hivemind', 'google.protobuf', 'torch', 'asyncio.base_events') if m in "
        "sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
