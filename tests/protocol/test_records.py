import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from protocol.address.multiaddr import InvalidAddress, address_from_bytes, address_to_bytes
from protocol.address.peer_id import peer_id_from_public_key
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import (
    MAX_ADDRESS_CHARS,
    MAX_RECORD_ADDRESSES,
    MAX_RECORD_BYTES,
    RECORD_SHARDS,
)
from protocol.membership.records import (
    PeerRecord,
    decode_record_at,
    encode_record,
    place_of,
    record_key,
    record_keys,
    valid_record_at,
)
from protocol.wire.messages import PeerEntry, PeerList, decode_message, encode_message

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
PEER = peer_id_from_public_key(PRIVATE.public_key().public_bytes_raw())
OTHER_PEER = peer_id_from_public_key(OTHER.public_key().public_bytes_raw())
KEY = record_key("run", PEER)
RECORD = PeerRecord(PEER, 7, ("/ip4/203.0.113.5/tcp/4001", "/dns4/a.example/tcp/1"), 1.75e9)


def _sealed(body, key=KEY, peer_id=PEER, private=PRIVATE):
    """A validly signed value around any body."""
    name = peer_id.encode()
    data = b"loco record 1\0" + place_of(key) + len(name).to_bytes(2, "big") + name + body
    return body + private.sign(data)


addresses = st.one_of(
    st.builds("/ip4/{}/tcp/{}".format, st.ip_addresses(v=4), st.integers(0, 65535)),
    st.builds("/ip6/{}/tcp/{}".format, st.ip_addresses(v=6), st.integers(0, 65535)),
    st.builds(
        "/dns4/{}/udp/{}/quic-v1".format,
        st.from_regex(r"[a-z]{1,30}", fullmatch=True),
        st.integers(0, 65535),
    ),
    st.builds("/ip4/{}/tcp/1/p2p/{}/p2p-circuit".format, st.ip_addresses(v=4), st.just(OTHER_PEER)),
)


@given(
    st.integers(0, 2**63 - 1),
    st.lists(addresses, min_size=1, max_size=6, unique=True),
    st.floats(1, 9e10),
)
def test_what_is_encoded_is_decoded_within_the_bound(incarnation, texts, expires_s):
    record = PeerRecord(PEER, incarnation, tuple(texts), expires_s)
    value = encode_record(record, KEY, PRIVATE.sign)
    assert len(value) <= MAX_RECORD_BYTES
    decoded = decode_record_at(place_of(KEY), PEER, value)
    assert decoded.addresses[0] == texts[0]
    assert set(decoded.addresses) <= set(texts)
    assert len(decoded.addresses) <= MAX_RECORD_ADDRESSES
    assert (decoded.peer_id, decoded.incarnation, decoded.expires_s) == (
        PEER,
        incarnation,
        expires_s,
    )


@given(addresses)
def test_addresses_survive_the_trip_through_bytes(text):
    assert address_from_bytes(address_to_bytes(text)) == text


def test_addresses_have_the_bytes_of_the_multiaddr_standard():
    assert address_to_bytes("/ip4/127.0.0.1/tcp/4001").hex() == "047f000001060fa1"
    assert address_to_bytes("/dns4/ab/udp/1/quic-v1").hex() == "36026162" + "91020001" + "cd03"


@given(
    st.binary(max_size=140)
    | st.lists(st.sampled_from([b"\x04" + bytes(4), b"\xa2\x02", b"\xcd\x03"])).map(b"".join)
)
def test_garbage_as_an_address_is_refused(data):
    """What is none cannot be told of another peer, and what is one can."""
    try:
        text = address_from_bytes(data)
    except InvalidAddress:
        return
    assert address_to_bytes(text) == data
    entry = PeerEntry(PEER, 1, (text,))
    assert decode_message(encode_message(PeerList((entry,)))) == PeerList((entry,))


@pytest.mark.parametrize("again", [20, 21])
def test_few_bytes_that_are_a_long_text_are_no_address(again):
    """A record's bound is on bytes, a peer list's on text: both hold for both."""
    data = b"\x04" + bytes([192, 0, 2, 1]) + b"\xa2\x02" * again
    text = "/ip4/192.0.2.1" + "/p2p-circuit" * again
    if len(text) <= MAX_ADDRESS_CHARS:
        assert (address_from_bytes(data), address_to_bytes(text)) == (text, data)
        return
    for read, form in ((address_from_bytes, data), (address_to_bytes, text)):
        with pytest.raises(InvalidAddress, match="longer than 256 characters"):
            read(form)
    body = msgpack.packb([1, 7, [data], 1.75e9])
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        decode_record_at(place_of(KEY), PEER, _sealed(body))


@given(st.binary(max_size=300))
def test_garbage_is_refused(value):
    with pytest.raises(RemoteProtocolError):
        decode_record_at(place_of(KEY), PEER, value)


@given(st.binary(max_size=MAX_RECORD_BYTES - 64))
def test_garbage_with_a_valid_signature_is_refused_all_the_same(body):
    with pytest.raises(RemoteProtocolError):
        decode_record_at(place_of(KEY), PEER, _sealed(body))


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(json_like, json_like, json_like)
def test_well_formed_lists_with_wrong_contents_are_refused_or_sound(incarnation, texts, expires_s):
    body = msgpack.packb([1, incarnation, texts, expires_s])
    if len(body) > MAX_RECORD_BYTES - 64:
        return
    with pytest.raises(RemoteProtocolError):
        decode_record_at(place_of(KEY), PEER, _sealed(body))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_each_changed_byte_is_noticed(position, change):
    value = bytearray(encode_record(RECORD, KEY, PRIVATE.sign))
    value[position % len(value)] ^= change
    with pytest.raises(RemoteProtocolError):
        decode_record_at(place_of(KEY), PEER, bytes(value))


@pytest.mark.parametrize(
    ("key", "subkey"),
    [(KEY, OTHER_PEER), (record_key("other run", PEER), PEER), (KEY, "no peer id"), (KEY, "")],
)
def test_a_record_counts_only_for_its_own_key_and_peer(key, subkey):
    value = encode_record(RECORD, KEY, PRIVATE.sign)
    with pytest.raises(RemoteProtocolError):
        decode_record_at(place_of(key), subkey, value)
    assert valid_record_at(place_of(key), subkey, value) is None


@pytest.mark.parametrize("subkey", ["x" * 70_000, "\udc80"], ids=["too long", "no Unicode"])
def test_a_name_that_is_no_peer_id_is_refused_before_it_is_signed_bytes(subkey):
    value = encode_record(RECORD, KEY, PRIVATE.sign)
    with pytest.raises(RemoteProtocolError, match="no peer id"):
        decode_record_at(place_of(KEY), subkey, value)


def test_a_signature_by_another_key_is_refused():
    with pytest.raises(RemoteProtocolError, match="signature"):
        decode_record_at(place_of(KEY), PEER, encode_record(RECORD, KEY, OTHER.sign))


def test_the_place_alone_is_enough_to_check():
    value = encode_record(RECORD, KEY, PRIVATE.sign)
    assert decode_record_at(place_of(KEY), PEER, value) == RECORD
    assert valid_record_at(place_of(KEY), PEER, value) == RECORD


def test_a_second_encoding_of_the_same_record_is_refused():
    body = msgpack.packb([1, 7, [address_to_bytes("/ip4/1.2.3.4/tcp/5")], 1.75e9])
    assert decode_record_at(place_of(KEY), PEER, _sealed(body)).incarnation == 7
    longer = body[:2] + b"\xcc\x07" + body[3:]  # the incarnation as a one-byte uint
    with pytest.raises(RemoteProtocolError, match="canonical"):
        decode_record_at(place_of(KEY), PEER, _sealed(longer))


def test_as_many_addresses_as_fit_best_first():
    long = tuple(f"/dns4/{letter * 60}/tcp/1" for letter in "abc")
    record = PeerRecord(PEER, 1, (*long[:1], "/unix/no", *long[1:], "/ip4/1.2.3.4/tcp/5"), 1.75e9)
    decoded = decode_record_at(place_of(KEY), PEER, encode_record(record, KEY, PRIVATE.sign))
    assert decoded.addresses == (long[0], "/ip4/1.2.3.4/tcp/5")


def test_the_own_peer_id_is_not_carried_twice():
    record = PeerRecord(PEER, 1, (f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}",), 1.75e9)
    value = encode_record(record, KEY, PRIVATE.sign)
    assert decode_record_at(place_of(KEY), PEER, value).addresses == ("/ip4/1.2.3.4/tcp/5",)


@pytest.mark.parametrize("texts", [(), ("/unix/a",), (f"/dns4/{'a' * 200}/tcp/1",), ("nonsense",)])
def test_a_record_without_a_usable_address_is_our_error(texts):
    with pytest.raises(LocalProtocolError, match="fits"):
        encode_record(PeerRecord(PEER, 1, texts, 1.75e9), KEY, PRIVATE.sign)


@pytest.mark.parametrize(
    ("incarnation", "expires_s"), [(-1, 1.0), (2**63, 1.0), (0, 0.0), (0, 1e300)]
)
def test_numbers_out_of_bounds_are_our_error(incarnation, expires_s):
    with pytest.raises(LocalProtocolError):
        encode_record(PeerRecord(PEER, incarnation, RECORD.addresses, expires_s), KEY, PRIVATE.sign)


def test_keys_are_shards_of_the_run():
    keys = record_keys("run")
    assert len(set(keys)) == RECORD_SHARDS
    assert KEY in keys
    assert not set(keys) & set(record_keys("other run"))
    peers = [peer_id_from_public_key(bytes([n]) * 32) for n in range(200)]
    assert {record_key("run", peer) for peer in peers} == set(keys)
