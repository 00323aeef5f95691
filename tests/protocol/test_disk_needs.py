"""What a peer takes on its disk."""

from protocol.run.needs import SPARE_BYTES, disk_needs

P = 1_000_000


def test_one_checkpoint_more_than_is_kept_lies_there_while_it_is_written():
    needs = disk_needs(P, checkpoint_keep=3)
    assert needs.least_bytes == 20 * P + SPARE_BYTES
    assert needs.total_bytes == 80 * P + 16 * P + SPARE_BYTES


def checkpoints(most: float) -> int:
    """Bytes of nine checkpoints of which all together may take so many."""
    return disk_needs(P, 9, checkpoint_max_bytes=most).total_bytes - 16 * P - SPARE_BYTES


def test_a_bound_of_their_bytes_keeps_fewer_but_always_one():
    assert checkpoints(50 * P) == 70 * P
    assert checkpoints(1) == 40 * P


def test_the_corpus_that_is_still_to_come_takes_room_too():
    with_corpus, without = disk_needs(P, 1, corpus_bytes=7), disk_needs(P, 1)
    assert with_corpus.total_bytes - without.total_bytes == 7
    assert with_corpus.least_bytes - without.least_bytes == 7
