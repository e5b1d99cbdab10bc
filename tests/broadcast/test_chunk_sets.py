from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.broadcast.chunk_sets import ChunkPool, ChunkSet

steps = st.lists(st.tuples(st.booleans(), st.integers(0, 19)), max_size=60)


@given(steps)
def test_a_chunk_set_is_a_set(changes):
    ours, model = ChunkSet(20), set()
    for add, index in changes:
        if add:
            assert ours.add(index) == (index not in model)
            model.add(index)
        else:
            assert ours.discard(index) == (index in model)
            model.discard(index)
        assert list(ours) == sorted(model)
        assert len(ours) == len(model)
        assert ours.complete == (len(model) == 20)
        assert [i in ours for i in range(20)] == [i in model for i in range(20)]


@given(steps, st.data())
def test_a_pool_is_a_set_that_can_be_walked_from_anywhere(changes, data):
    ours, model = ChunkPool(), set()
    for add, index in changes:
        if add:
            assert ours.add(index) == (index not in model)
            model.add(index)
        else:
            assert ours.discard(index) == (index in model)
            model.discard(index)
    start = data.draw(st.integers(0, max(0, len(model) - 1)))
    assert sorted(ours.walk(start)) == sorted(model) == sorted(ours)
    assert len(ours) == len(model)


def test_the_full_set_holds_all():
    assert ChunkSet.full(3).complete
    assert list(ChunkSet.full(3)) == [0, 1, 2]
    assert list(ChunkSet(4, [3, 1, 3])) == [1, 3]
