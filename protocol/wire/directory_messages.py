"""Messages of the table in which peers find each other, on `/loco/directory/1`.

A question has a stream of its own. No node id travels: a peer's follows from its peer id, so one
identity is one node. Nor does a record's peer where it is to be kept: a peer stores its own.
"""

from typing import Annotated

from msgspec import Meta, Struct

from protocol.limits import MAX_RECORD_BYTES, NEAREST_NODES, PLACE_BYTES, RECORDS_OF_SHARD

from .fields import ITEMWISE, FewAddresses, Message, PeerIdText

Place = Annotated[bytes, Meta(min_length=PLACE_BYTES, max_length=PLACE_BYTES)]
RecordValue = Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


class FoundRecord(Struct, frozen=True, array_like=True):
    """A record (protocol/membership/records.py) and the peer that it is of."""

    peer_id: PeerIdText
    value: RecordValue


class NearNode(Struct, frozen=True, array_like=True):
    """A node of the table, and addresses where the sender last knew it, if it did."""

    peer_id: PeerIdText
    addresses: FewAddresses = ()


class FindRecords(Message, frozen=True, tag="find_records"):
    """Asks for the records at this place, and for nodes nearer to it."""

    place: Place


class RecordsFound(Message, frozen=True, tag="records_found"):
    """The sender's records at a place, and the nodes nearest to it, as far as it knows."""

    records: Annotated[tuple[FoundRecord, ...], Meta(max_length=RECORDS_OF_SHARD.total), ITEMWISE]
    nearest: Annotated[tuple[NearNode, ...], Meta(max_length=NEAREST_NODES), ITEMWISE]


class KeepRecord(Message, frozen=True, tag="keep_record"):
    """Please keep my record at this place until it expires."""

    place: Place
    value: RecordValue


class RecordKept(Message, frozen=True, tag="record_kept"):
    kept: bool
