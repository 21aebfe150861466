import hypothesis.strategies as st
from hypothesis import given, settings

from stages.tuner.order import Order, epoch_batches, occurrences

shapes = st.lists(st.sampled_from([(64, 64), (64, 96), (96, 64)]), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_has_every_row_once_in_batches_of_one_shape(shapes, size, seed, epoch):
    batches = epoch_batches(shapes, size, seed, epoch)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(shapes)))
    assert all(len({shapes[row] for row in batch.rows}) == 1 for batch in batches)
    assert all(1 <= len(batch.rows) <= size and batch.epoch == epoch for batch in batches)
    small = [shapes[batch.rows[0]] for batch in batches if len(batch.rows) < size]
    assert len(small) == len(set(small))  # at most one remainder a bucket
    assert batches == epoch_batches(shapes, size, seed, epoch)


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(1, 3), st.integers(1, 4))
def test_the_steps_take_all_batches_of_all_epochs_in_order(shapes, size, accumulate):
    order = Order(shapes, size, 0, accumulate)
    walked = [batch for step in range(1, 12) for batch in order.step(step)]
    epochs = [batch for epoch in range(walked[-1].epoch + 1) for batch in epoch_batches(shapes, size, 0, epoch)]
    assert walked == epochs[: len(walked)]
    assert Order(shapes, size, 0, accumulate).step(9) == order.step(9)


def test_the_order_differs_between_epochs_and_seeds():
    same = [(64, 64)] * 30
    assert len({tuple(epoch_batches(same, 1, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    rows = {tuple(batch.rows for batch in epoch_batches(same, 4, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(rows) == 4


def test_batches_of_different_shapes_are_mixed():
    mixed = [(64, 64)] * 20 + [(96, 64)] * 20
    first = [batch.rows[0] < 20 for batch in epoch_batches(mixed, 1, 0, 0)]
    assert 4 < sum(first[:20]) < 16


rated = st.lists(
    st.tuples(st.sampled_from([(64, 64), (64, 96)]), st.sampled_from([0.0, 0.25, 1 / 3, 1.0, 2.0])), min_size=1, max_size=20
).filter(lambda rows: any(rate for _, rate in rows))


@settings(max_examples=60, deadline=None)
@given(rated, st.integers(0, 3))
def test_rows_occur_as_often_as_their_rates_say_and_take_turns(rows, seed):
    rates = [rate for _, rate in rows]
    epochs = [occurrences(rates, seed, epoch) for epoch in range(12)]
    for row, rate in enumerate(rates):
        assert sum(epoch[row] for epoch in epochs) == round(12 * rate)
        assert all(abs(epoch[row] - rate) < 1 for epoch in epochs)
    for rate in set(rates):
        sizes = [sum(n for n, r in zip(epoch, rates, strict=True) if r == rate) for epoch in epochs]
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40, deadline=None)
@given(rated, st.integers(1, 3), st.integers(1, 3))
def test_the_steps_take_all_batches_of_epochs_of_unequal_length_in_order(rows, size, accumulate):
    shapes, rates = zip(*rows, strict=True)
    order = Order(shapes, size, 0, accumulate, rates)
    walked = [batch for step in range(1, 12) for batch in order.step(step)]
    epochs = [batch for epoch in range(walked[-1].epoch + 1) for batch in epoch_batches(shapes, size, 0, epoch, rates)]
    assert walked == epochs[: len(walked)]
    assert Order(shapes, size, 0, accumulate, rates).step(11) == order.step(11)
    for batch in walked:
        assert 1 <= len(batch.rows) <= size
        assert len({shapes[row] for row in batch.rows}) == 1


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(1, 3), st.integers(0, 3))
def test_equal_rates_change_no_draw(shapes, size, epoch):
    assert epoch_batches(shapes, size, 0, epoch, [1.0] * len(shapes)) == epoch_batches(shapes, size, 0, epoch)
