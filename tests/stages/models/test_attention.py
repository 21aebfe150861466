import mlx.core as mx
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages import kernels
from stages.models import attention as module
from stages.models.attention import attention, chunk_rows, chunked, divided, keeps_scores, kept


def random_array(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape) + len(shape))).astype(dtype)


def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return mx.softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, axis=-1) @ v


def relative_error(found: mx.array, true: mx.array) -> float:
    return (mx.linalg.norm((found - true).flatten()) / mx.linalg.norm(true.flatten())).item()


def agree(ours, q, k, v, dy, of_result=1e-6, of_gradients=2e-6):
    """`ours` is plain attention, and so are its gradients."""
    (true,), true_grads = mx.vjp(plain, [q, k, v], [dy])
    (y,), grads = mx.vjp(ours, [q, k, v], [dy])
    assert y.shape == q.shape and relative_error(y, true) < of_result
    for found, wanted in zip(grads, true_grads, strict=True):
        assert relative_error(found, wanted) < of_gradients


@pytest.mark.parametrize(("queries", "keys", "rows"), [(40, 40, 8), (37, 37, 8), (5, 29, 2), (16, 16, 16), (7, 3, 100)])
def test_chunked_attention_and_its_gradients_are_those_of_plain_attention(queries, keys, rows):
    q, dy = random_array(2, 3, queries, 16), random_array(2, 3, queries, 16)[::-1]
    k, v = random_array(2, 3, keys, 16), 2 * random_array(2, 3, keys, 16) + 1
    agree(lambda q, k, v: chunked(q, k, v, 0.25, rows), q, k, v, dy)


@pytest.mark.parametrize("strided", [False, True])
def test_attention_that_keeps_its_probabilities_is_plain_attention_with_its_gradients(strided):
    q, k, v, dy = (random_array(2, 3, 20 + n, 16) + n for n in (0, 1, 1, 0))
    if strided:
        q, k, v, dy = (mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v, dy))
    agree(lambda q, k, v: kept(0.25 * q, k, v, most=1), q, k, v, dy, 2e-6, 4e-6)


def test_attention_runs_in_chunks_if_its_scores_are_too_large_with_the_same_result(monkeypatch):
    q, k, v = (random_array(1, 2, 300, 8) + i for i in range(3))
    whole = attention(q, k, v, 8**-0.5)
    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * 300 * 4 * 130)
    assert chunk_rows(q, k) == 128
    went: list[int] = []
    monkeypatch.setattr(module, "chunked", lambda q, *rest: went.append(q.shape[2]) or chunked(q, *rest))
    assert relative_error(attention(q, k, v, 8**-0.5), whole) < 1e-6
    assert relative_error(attention(q[:, :, :100], k, v, 8**-0.5), whole[:, :, :100]) < 1e-6
    assert went == [300]  # the 100 rows fit into one chunk, and are not cut


def test_padded_query_rows_change_neither_result_nor_gradients(monkeypatch):
    monkeypatch.setattr(module, "fused_gradient", lambda q: True)
    q, k, v, dy = (random_array(1, 2, 37, 8) + i for i in range(4))
    agree(lambda q, k, v: attention(q, k, v, 8**-0.5), q, k, v, dy)


def test_a_gradient_by_chunks_holds_one_chunk_and_not_the_matrix():
    rows, width = 1024, 8
    q, k, v, dy = (random_array(1, 2, rows, width) + i for i in range(4))
    mx.eval(q, k, v, dy)

    def peak(run) -> int:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        limit = mx.set_memory_limit(before)  # nothing is dispatched ahead: what is live is what is needed
        mx.eval(mx.vjp(run, [q, k, v], [dy]))
        mx.set_memory_limit(limit)
        return mx.get_peak_memory() - before

    matrix = 2 * rows * rows * 4
    assert peak(lambda q, k, v: chunked(q, k, v, 0.3, 64)) < matrix / 2
    assert peak(plain) > matrix


def test_chunked_attention_in_bfloat16_stays_bfloat16_and_near_the_truth():
    q, k, v, dy = (random_array(1, 2, 64, 16) + i / 4 for i in range(4))
    _, true = mx.vjp(plain, [q, k, v], [dy])
    low = [x.astype(mx.bfloat16) for x in (q, k, v)]
    (y,), grads = mx.vjp(lambda q, k, v: chunked(q, k, v, 0.25, 16), low, [dy.astype(mx.bfloat16)])
    assert {x.dtype for x in (y, *grads)} == {mx.bfloat16}
    for found, wanted in zip(grads, true, strict=True):
        assert relative_error(found.astype(mx.float32), wanted) < 0.02


def test_the_gradient_of_attention_is_contiguous_whatever_follows(monkeypatch):
    """MLX's cuDNN graph of the gradient is kept without regard to that layout."""
    monkeypatch.setattr(module, "fused_gradient", lambda q: True)
    seen = []

    @mx.custom_function
    def fused(q, k, v):
        return plain(q, k, v)

    @fused.vjp
    def fused_vjp(primals, dy, _):
        mx.eval(dy)
        seen.append(memoryview(dy).strides)
        return mx.vjp(plain, list(primals), [dy])[1]

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda q, k, v, scale: fused(q, k, v))
    B, L, H, K = 1, 128, 2, 8

    def alone(q):
        return (attention(q, q, q, K**-0.5).swapaxes(1, 2).flatten(2) * 2).sum()

    def beside(q):
        y_BLD = attention(q, q, q, K**-0.5).swapaxes(1, 2).flatten(2)
        return mx.square(mx.concatenate([y_BLD, 3 * y_BLD], axis=-1)).sum()

    for made in (alone, beside):
        mx.eval(mx.grad(made)(random_array(B, H, L, K)))
    assert seen == [(4 * L * H * K, 4 * K, 4 * H * K, 4)] * 2  # of (B,H,L,K), bytes


@pytest.mark.parametrize(("queries", "keys"), [(37, 29), (64, 64)])
def test_divided_attention_and_its_gradients_are_those_of_plain_attention(queries, keys, monkeypatch):
    monkeypatch.setattr(kernels, "limited", lambda: True)
    monkeypatch.setattr(kernels, "LIMIT", 4.0 * 2 * 3 * 16 * keys * 10)  # ten query rows
    q, k, v, dy = (random_array(2, 3, rows, 16) for rows in (queries, keys, keys, queries))
    agree(lambda q, k, v: divided(q, k, v, 0.25), q, k, v, dy, 2e-6, 4e-6)


def test_asking_whether_mlx_keeps_scores_computes_nothing_and_leaves_the_peak_memory_of_the_process():
    mx.eval(mx.zeros(5_000_000))
    peak = mx.get_peak_memory()
    keeps_scores.cache_clear()
    assert keeps_scores(mx.float32, 64), "a CPU keeps them"
    assert mx.get_peak_memory() == peak
    keeps_scores.cache_clear()
    nodes = []
    mx.export_function(nodes.append, lambda x: 2 * x if keeps_scores(mx.float32, 64) else x, mx.ones(3))
    assert not any(node.get("name") == "Matmul" for node in nodes), "the question is no part of a graph that is traced"
