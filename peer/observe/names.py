"""How peers are named to people."""


def short_id(peer_id: str | None) -> str:
    """The last eight characters of a peer id: the first ones are the same in all of them."""
    return peer_id[-8:] if peer_id else "-"
