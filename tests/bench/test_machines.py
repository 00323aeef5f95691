"""What is taken for the bytes of one average, and what is trained meanwhile."""

from bench.machines import one_apart, spec_of


def test_bytes_of_an_average_lie_between_moments_that_are_one_average_apart():
    """Where two ended between two looks, nobody can say which of them sent what."""
    assert one_apart([(1, 900), (2, 1_800), (4, 3_600), (5, 4_501)]) == [900, 901]
    assert one_apart([(3, 900)]) == []


def test_runs_are_endless_and_give_four_ranks_a_sequence_each():
    for millions in (None, 13):
        spec = spec_of(millions, 4)
        assert spec.sync.inner_steps == 4
        assert spec.training.batch_size >= 4
        assert spec.training.total_steps == 1_000_000
