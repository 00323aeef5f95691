"""Our encoding of p2pd's control messages against hivemind's generated one."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.network.p2pd import (
    P2pdRefused,
    PeerAddresses,
    RequestType,
    StreamInfo,
    parse_peer,
    parse_response,
    parse_stream_info,
    request,
)
from peer.network.protobuf import all_of, one_of
from protocol.address.varint import decode_uvarint
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
    kinds = pb.Request
    expected = {
        request(RequestType.IDENTIFY): kinds(type=kinds.IDENTIFY),
        request(RequestType.LIST_PEERS): kinds(type=kinds.LIST_PEERS),
        request(RequestType.PERSISTENT_CONN_UPGRADE): kinds(type=kinds.PERSISTENT_CONN_UPGRADE),
        request(RequestType.CONNECT, (1, b"p"), (2, b"a"), (2, b"b" * 300), (3, 15)): kinds(
            type=kinds.CONNECT,
            connect=pb.ConnectRequest(peer=b"p", addrs=[b"a", b"b" * 300], timeout=15),
        ),
        request(RequestType.STREAM_OPEN, (1, b"p"), (2, b"/x/1"), (3, 300)): kinds(
            type=kinds.STREAM_OPEN,
            streamOpen=pb.StreamOpenRequest(peer=b"p", proto=["/x/1"], timeout=300),
        ),
        request(RequestType.DISCONNECT, (1, b"p")): kinds(
            type=kinds.DISCONNECT, disconnect=pb.DisconnectRequest(peer=b"p")
        ),
        request(RequestType.STREAM_HANDLER, (1, b"l"), (2, b"/x/1"), (3, 0)): kinds(
            type=kinds.STREAM_HANDLER,
            streamHandler=pb.StreamHandlerRequest(addr=b"l", proto=["/x/1"], balanced=False),
        ),
    }
    for ours, theirs in expected.items():
        length, start = decode_uvarint(ours)
        assert len(ours) == start + length
        assert ours[start:] == theirs.SerializeToString(deterministic=True)


def test_responses_of_hiveminds_encoding_are_understood(generated: ModuleType) -> None:
    pb = generated
    ok = pb.Response(
        type=pb.Response.OK,
        identify=pb.IdentifyResponse(id=b"me", addrs=[b"a", b"b"]),
        peers=[pb.PeerInfo(id=b"p", addrs=[b"c"]), pb.PeerInfo(id=b"q")],
    )
    fields = parse_response(ok.SerializeToString())
    assert parse_peer(one_of(fields, 4, bytes)) == PeerAddresses(b"me", (b"a", b"b"))
    peers = [parse_peer(each) for each in all_of(fields, 6)]
    assert peers == [PeerAddresses(b"p", (b"c",)), PeerAddresses(b"q", ())]
    failed = pb.Response(type=pb.Response.ERROR, error=pb.ErrorResponse(msg="no way"))
    with pytest.raises(P2pdRefused, match="no way"):
        parse_response(failed.SerializeToString())
    with pytest.raises(P2pdRefused, match="no reason given"):
        parse_response(pb.Response(type=pb.Response.ERROR).SerializeToString())
    info = pb.StreamInfo(peer=b"p", addr=b"a", proto="/x/1").SerializeToString()
    assert parse_stream_info(info) == StreamInfo(b"p", b"a", "/x/1")


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_worse(data: bytes) -> None:
    for parse in (parse_response, parse_stream_info, parse_peer):
        try:
            parse(data)
        except (RemoteProtocolError, P2pdRefused):
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
