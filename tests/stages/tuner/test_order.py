from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from stages.tuner.order import Order, Rates

SHAPES = [(64, 64), (64, 96), (96, 64), (32, 32)]
shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=40)
sizes = st.integers(1, 7)
seeds = st.integers(0, 3)


def counts(order, epochs):
    return Counter(row for epoch in epochs for batch in order.epoch(epoch) for row in batch.rows)


@settings(max_examples=50, deadline=None)
@given(shapes, sizes, seeds, st.integers(0, 9), st.integers(1, 3))
def test_every_step_has_as_many_rows_as_the_settings_say(shapes, size, seed, step, accumulate):
    parts = Order(shapes, size, seed, accumulate).step(step + 1)
    assert sum(len(part.rows) for part in parts) == size * accumulate
    assert all(len({shapes[row] for row in part.rows}) == 1 for part in parts)


@settings(max_examples=50, deadline=None)
@given(shapes, sizes, seeds, st.integers(0, 30))
def test_over_any_ten_epochs_every_row_is_drawn_ten_times_give_or_take_one(shapes, size, seed, first):
    size = min(size, len(shapes))
    drawn = counts(Order(shapes, size, seed), range(first, first + 10))
    assert all(abs(drawn[row] - 10) <= 1 for row in range(len(shapes)))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), sizes, seeds)
def test_fewer_rows_than_a_batch_repeat_in_it_equally_often(count, size, seed):
    order = Order([(64, 64)] * count, size, seed)
    for step in range(1, 9):
        (batch,) = order.step(step)
        assert len(batch.rows) == size
        assert max(Counter(batch.rows).values()) <= -(-size // count) + (size % count > 0)
    drawn = Counter(row for step in range(1, 9) for batch in order.step(step) for row in batch.rows)
    assert max(drawn.values()) - min(drawn[row] for row in range(count)) <= 1


@settings(max_examples=40, deadline=None)
@given(shapes, sizes, seeds)
def test_a_batch_has_several_shapes_only_if_one_has_too_few_rows_and_no_row_twice_while_others_could_fill_it(shapes, size, seed):
    order, many = Order(shapes, size, seed), Counter(shapes)
    seen = Counter()
    for batch in map(order.batch_at, range(40)):
        assert size > len(shapes) or len(set(batch.rows)) == size
        found = Counter(shapes[row] for row in batch.rows)
        assert len(found) == 1 or set(found) <= set(order.sharing)
        for shape, count in found.items():
            seen[shape] = max(seen[shape], count)
    assert bool(order.sharing) == any(count < size for count in many.values()) * (len(many) > 1)
    assert all(seen[shape] <= order.most(shape) <= size for shape in seen)


@settings(max_examples=40, deadline=None)
@given(shapes, sizes, seeds, st.integers(1, 400))
def test_a_step_has_the_next_batches_of_the_epochs_in_order_whatever_was_asked_before(shapes, size, seed, step):
    order = Order(shapes, size, seed, 2)
    walked = [order.batch_at(number) for number in range(24)]
    epochs = [batch for epoch in range(walked[-1].epoch + 1) for batch in order.epoch(epoch)]
    assert walked == epochs[:24] and order.per_epoch == len(shapes) / size
    for n in range(12, 0, -1):
        rows = [row for batch in walked[2 * n - 2 : 2 * n] for row in batch.rows]
        assert Counter(row for part in order.step(n) for row in part.rows) == Counter(rows)
    alone = Order(shapes, size, seed, 2).step(step)
    assert order.step(step) == alone == Order(shapes, size, seed, 2).step(step)


def test_the_order_differs_between_epochs_and_seeds():
    same = [(64, 64)] * 30
    rows = {tuple(batch.rows for batch in Order(same, 4, seed).epoch(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(rows) == 4


def test_batches_of_different_shapes_are_mixed():
    mixed = [(64, 64)] * 20 + [(96, 64)] * 20
    first = [batch.rows[0] < 20 for batch in Order(mixed, 1, 0).epoch(0)]
    assert 4 < sum(first[:20]) < 16


rated = st.lists(
    st.tuples(st.sampled_from([(64, 64), (64, 96)]), st.sampled_from([0.0, 0.25, 1 / 3, 1.0, 2.0])), min_size=1, max_size=20
).filter(lambda rows: any(rate for _, rate in rows))


@settings(max_examples=40, deadline=None)
@given(rated, seeds)
def test_rows_occur_as_often_as_their_rates_say_and_take_turns(rows, seed):
    rates = [rate for _, rate in rows]
    passes = np.array([Rates(rates, seed).within(number) for number in range(12)])
    for row, rate in enumerate(rates):
        assert passes[:, row].sum() == round(12 * rate)
        assert (abs(passes[:, row] - rate) < 1).all()
    for rate in set(rates):
        sizes = passes[:, np.array(rates) == rate].sum(axis=1)
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40, deadline=None)
@given(rated, sizes, seeds, st.integers(0, 20))
@example([((64, 64), 0.0)] * 4 + [((64, 64), 0.25)], 5, 0, 0)  # the only row drawn fills its batches alone
@example([((64, 64), 2.0), *[((64, 64), 0.25)] * 6], 7, 0, 2)  # as many rows as a batch has, but fewer in a pass
def test_rated_rows_keep_their_shares_in_full_batches(rows, size, seed, first):
    shapes, rates = zip(*rows, strict=True)
    order = Order(shapes, size, seed, rates=rates)
    batches = [batch for epoch in range(first, first + 24) for batch in order.epoch(epoch)]
    assert all(len(batch.rows) == size for batch in batches)
    drawn = Counter(row for batch in batches for row in batch.rows)
    for group in order.groups:
        ends = range(first, first + 25, 24)  # at either end, up to size - 1 draws of later passes fill a batch
        before = [order.rates.before(epoch)[group].sum() for epoch in ends]
        passes = 0  # that those draws may take
        while any(order.rates.before(e + passes)[group].sum() - n < size - 1 for e, n in zip(ends, before, strict=True)):
            passes += 1
        for row in group:
            assert abs(drawn[row] - 24 * rates[row]) <= min(size - 1, np.ceil(passes * rates[row]))
    assert all(rates[row] for row in drawn)
    assert all(count <= order.most(shapes[row]) for batch in batches for row, count in Counter(batch.rows).items())


@settings(max_examples=30, deadline=None)
@given(shapes, sizes, st.integers(0, 3))
def test_equal_rates_change_no_draw(shapes, size, epoch):
    assert Order(shapes, size, 0, 1, None).epoch(epoch) == Order(shapes, size, 0, 1, [1.0] * len(shapes)).epoch(epoch)


@pytest.mark.parametrize("rates", [[0.001] * 3, [1000.0, 0.001]])
def test_extreme_rates_give_full_batches(rates):
    order = Order([(64, 64)] * len(rates), 4, 0, rates=rates)
    assert all(len(batch.rows) == 4 for step in (1, 2, 50) for batch in order.step(step))
