"""T5's encoder and its projection head as a chain of blocks: token ids to unit vectors, one per token.

Several parts (queries and documents, say), each an array of token ids with its own length, pass through the chain at once.
Their tokens lie one after another, so that every Linear is one matrix product. Only attention knows the parts. Some operations
have a gradient of their own, as MLX's keeps more in memory or computes gradients of frozen weights.
T tokens of all parts, B texts of a part, b texts of a chunk, L tokens of a text, D model width, H heads, K head width, E width
of a token vector.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages.kernels import compiles, most_items, product_flop, slices
from stages.models.attention import (
    FUSED_ROWS,
    after,
    fused_forward,
    fused_gradient,
    kept,
    one_layout,
    plain_linear,
    pull_back,
    rms_norm,
    sigmoid,
    slow_exp,
    softmax,
)
from stages.models.family import Block, Linear
from stages.models.folders import checked_sizes
from stages.own_gradient import OwnGradient

Shape = tuple[int, ...]

# Names of activations in a config.json -> the form of the feed-forward: (gated, activation).
FEED_FORWARDS = {"relu": (False, "relu"), "gated-gelu": (True, "gelu_new")}
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
EMBEDDING, FINAL_NORM = "shared.weight", "encoder.final_layer_norm.weight"
DENSE = "layer.1.DenseReluDense"  # the feed-forward within a block
HEAD = "head.linear.weight"  # the projection; its file names it linear.weight


@dataclass(frozen=True)
class T5Config:
    """Fields have the names of config.json, but for `gated` and `dimensions`."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    gated: bool  # T5 v1.1: gelu(h W0) * (h W1) in the feed-forward; else relu(h W)
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    dimensions: int = 128  # width of a token vector, the output of the head

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], dimensions: int = 128) -> T5Config:
        """Raises ValueError if a size is missing, or the feed-forward is not that of T5 v1.0 or v1.1."""
        kind = str(config.get("feed_forward_proj", "relu"))
        if kind not in FEED_FORWARDS:
            raise ValueError(f"feed_forward_proj of the encoder must be relu or gated-gelu, got {kind!r}")
        gated, activation = FEED_FORWARDS[kind]
        given = config.get("dense_act_fn", activation)
        if given != activation:
            raise ValueError(f"dense_act_fn of the encoder must be {activation} with {kind}, got {given!r}")
        content = {**config, "gated": gated, "dimensions": dimensions}
        return cls(**checked_sizes(cls, content, "the encoder's config", "T5"))

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json that transformers reads."""
        sizes = asdict(self)
        gated, _ = sizes.pop("gated"), sizes.pop("dimensions")
        return {
            "architectures": ["T5EncoderModel"],
            "model_type": "t5",
            **sizes,
            "num_decoder_layers": self.num_layers,
            "feed_forward_proj": "gated-gelu" if gated else "relu",
            "is_gated_act": gated,
            "dense_act_fn": "gelu_new" if gated else "relu",
            "dropout_rate": 0.1,
            "is_encoder_decoder": False,
            "use_cache": False,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }

    def block_shapes(self) -> dict[str, Shape]:
        D, inner, F = self.d_model, self.num_heads * self.d_kv, self.d_ff
        attention = {f"layer.0.SelfAttention.{name}": (inner, D) for name in ("q", "k", "v")}
        forward = {"wi_0": (F, D), "wi_1": (F, D), "wo": (D, F)} if self.gated else {"wi": (F, D), "wo": (D, F)}
        shapes: dict[str, Shape] = {
            **attention,
            "layer.0.SelfAttention.o": (D, inner),
            "layer.0.layer_norm": (D,),
            **{f"{DENSE}.{name}": shape for name, shape in forward.items()},
            "layer.1.layer_norm": (D,),
        }
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def encoder_shapes(self) -> dict[str, Shape]:
        block = self.block_shapes().items()
        blocks = {f"encoder.block.{n}.{name}": shape for n in range(self.num_layers) for name, shape in block}
        table = (self.relative_attention_num_buckets, self.num_heads)
        return {EMBEDDING: (self.vocab_size, self.d_model), BIAS: table, **blocks, FINAL_NORM: (self.d_model,)}

    def shapes(self) -> dict[str, Shape]:
        return {**self.encoder_shapes(), HEAD: (self.dimensions, self.d_model)}


HIDDEN = -1e9  # added to the scores of padding
# Bytes of a chunk's scores on a CPU: about what its cache holds. Scores of 8 MB take a third more time.
CHUNK_BYTES = 2 << 20
STEEP, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715  # gelu(x) = x sigmoid(STEEP (x + CUBIC x^3))


def buckets(length: int, count: int, furthest: int) -> np.ndarray:
    """(length, length) int32: the bucket of the key of column j for the query of row i, below `count`.

    The upper half is for keys after the query. A small distance has its own bucket; larger ones share buckets of growing range,
    and all from `furthest` on share one.
    """
    offset = np.arange(length)[None, :] - np.arange(length)[:, None]
    half = count // 2
    exact = half // 2
    distance = np.abs(offset)
    # float64 on the host: in float32 a device may round a power to the wrong bucket.
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(furthest / exact)
    far = np.minimum(exact + (ratio * (half - exact)).astype(np.int64), half - 1)
    near = np.where(distance < exact, distance, far)
    found: np.ndarray = (near + half * (offset > 0)).astype(np.int32)
    return found


def gelu_times(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) * up with GELU in its tanh form, as in T5 v1.1. Computed in float32, returned in the dtype of `up`."""
    return _gelu_times_kept(gate, up)[0] if slow_exp(gate) else _gelu_times(gate, up)


@OwnGradient
def _gelu_times_kept(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    wide, share = _wide_and_share(gate)
    return wide * share * up, share


@_gelu_times_kept.vjp
def _gelu_times_kept_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
    (gate, up), (_, share), dy = primals, outputs, cotangents[0]
    return dy * up * _slope(gate, share), dy * (gate * share)


def _slope(wide: mx.array, share: mx.array) -> mx.array:
    # The derivative of wide * share.
    return share + (share - share * share) * (wide * (STEEP + 3 * STEEP * CUBIC * (wide * wide)))


@OwnGradient
def _gelu_times(gate: mx.array, up: mx.array) -> mx.array:
    wide, share = _wide_and_share(gate)
    return (wide * share * up.astype(mx.float32)).astype(up.dtype)


@_gelu_times.vjp
def _gelu_times_vjp(primals: Any, dy: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    # Each dependency keeps the compiler from reusing, and so keeping, float32 values of an earlier product: every product
    # is then one kernel that reads and writes half precision. Without a compiler, each value is computed once.
    gate, up = mx.depends(list(primals), [dy])
    wide, share = _wide_and_share(gate)
    by_up = dy.astype(mx.float32)
    dgate = (by_up * up.astype(mx.float32) * _slope(wide, share)).astype(gate.dtype)
    if compiles():
        gate, dy = mx.depends([gate, dy], [dgate])
        wide, share = _wide_and_share(gate)
        by_up = dy.astype(mx.float32)
    return dgate, (by_up * (wide * share)).astype(up.dtype)


def _wide_and_share(gate: mx.array) -> tuple[mx.array, mx.array]:
    # gelu(x) = x share, share = (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3).
    wide = gate.astype(mx.float32)
    return wide, sigmoid(wide * (STEEP + STEEP * CUBIC * (wide * wide)))


def attend(q_BHLK: mx.array, k_BHLK: mx.array, v_BHLK: mx.array, mask_BHLL: mx.array) -> mx.array:
    """softmax(q k^T + mask) v. The mask gets no gradient. Probabilities are stored only where softmax is slow."""
    # Scores are not scaled anywhere: T5's weights contain that factor.
    if slow_exp(q_BHLK):
        B, H, L, _ = q_BHLK.shape
        return kept(q_BHLK, k_BHLK, v_BHLK, mask_BHLL, max(1, CHUNK_BYTES // (4 * H * L * L)))
    # cuDNN's gradient with a mask is wrong for some lengths that are no multiple of 128: NaN for an odd multiple of 64.
    if fused_gradient(q_BHLK) and q_BHLK.shape[2] % FUSED_ROWS == 0:
        return one_layout(mx.fast.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, scale=1.0, mask=mask_BHLL))

    B, H, L, K = q_BHLK.shape
    parts = slices(B, most_items(2 * H * product_flop(L, K, L)))

    def probabilities(q_bHLK: mx.array, k_bHLK: mx.array, part: slice) -> mx.array:
        return softmax(q_bHLK @ k_bHLK.swapaxes(-1, -2) + mask_BHLL[part])

    @OwnGradient
    def forward(q_BHLK: mx.array, k_BHLK: mx.array, v_BHLK: mx.array) -> mx.array:
        done: list[mx.array] = []
        if fused_forward(q_BHLK):
            for part in parts:
                q, k, v = q_BHLK[part], k_BHLK[part], v_BHLK[part]
                done.append(mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask_BHLL[part]))
            return mx.concatenate(done) if len(done) > 1 else done[0]
        for part in parts:
            q_bHLK = after(q_BHLK[part], done[-1:])
            done.append(probabilities(q_bHLK, k_BHLK[part], part) @ v_BHLK[part])
        return mx.concatenate(done)

    @forward.vjp
    def backward(primals: Any, dy_BHLK: mx.array, y_BHLK: mx.array) -> list[mx.array]:
        done: list[tuple[mx.array, ...]] = []
        for part in parts:
            before = list(done[-1]) if done else [dy_BHLK]
            q, k, v, dy, y = mx.depends([x[part] for x in (*primals, dy_BHLK, y_BHLK)], before)
            done.append(pull_back(q, k, v, probabilities(q, k, part), y, dy))
        return [mx.concatenate(list(each)) for each in zip(*done, strict=True)]

    return forward(q_BHLK, k_BHLK, v_BHLK)


Shared = list[dict[str, mx.array]]  # per part: mask_BHLL, added to the scores of every block, and real_BL

TABLES_KEPT = 16  # tables of buckets in memory, one per length
EPS = 1e-12  # the least norm that a vector is divided by, as in PyTorch's normalize


@functools.lru_cache(TABLES_KEPT)
def bucket_table(length: int, count: int, furthest: int) -> mx.array:
    return mx.array(buckets(length, count, furthest))


class T5:
    """`model(ids, real)` -> float32 (B, L, E) per part, from int32 `ids` and boolean `real` (False: padding), each (B, L)."""

    def __init__(self, config: T5Config, weights: Mapping[str, Any]) -> None:
        """`weights` by the names of `config.shapes()`. A Linear's may be packed, if the caller's `linear` computes with it."""
        self.config = config
        self.embedding, self.bias = weights[EMBEDDING], weights[BIAS]
        kind = "gated" if config.gated else "relu"
        self.blocks = [
            Block(kind, name, {inside: weights[f"{name}.{inside}"] for inside in config.block_shapes()})
            for name in (f"encoder.block.{n}" for n in range(config.num_layers))
        ]
        head = {"final_layer_norm.weight": weights[FINAL_NORM], "linear.weight": weights[HEAD]}
        self.blocks.append(Block("head", "head", head))

    @property
    def dtype(self) -> mx.Dtype:
        found: mx.Dtype = self.embedding.dtype
        return found

    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) by full name; the last is head.linear."""
        shapes = {name: shape for name, shape in self.config.shapes().items() if name not in (EMBEDDING, BIAS)}
        return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}

    def enter(self, ids: Sequence[mx.array], real: Sequence[mx.array]) -> tuple[mx.array, Shared]:
        """(h_TD, masks of each part). Arguments as in `T5`."""
        h_TD = mx.concatenate([self.embedding[part_BL.reshape(-1)] for part_BL in ids])
        shared, c = [], self.config
        for real_BL in real:
            table = bucket_table(real_BL.shape[1], c.relative_attention_num_buckets, c.relative_attention_max_distance)
            bias_1HLL = self.bias[table].transpose(2, 0, 1)[None]
            hidden_B11L = mx.where(real_BL, 0.0, HIDDEN)[:, None, None, :]
            mask_BHLL = mx.contiguous(bias_1HLL).astype(self.dtype) + hidden_B11L.astype(self.dtype)
            shared.append({"mask_BHLL": mask_BHLL, "real_BL": real_BL})
        return h_TD, shared

    def block(self, kind: str) -> Callable[..., mx.array]:
        """function(weights, h_TD, shared, linear=plain_linear) of a kind of blocks. The head's vectors are not normalised yet."""
        eps, heads = self.config.layer_norm_epsilon, self.config.num_heads
        if kind == "head":
            return lambda weights, h_TD, shared, linear=plain_linear: linear(
                "linear", weights["linear.weight"], rms_norm(h_TD, weights["final_layer_norm.weight"], eps)
            )

        def layer(weights: Mapping[str, Any], h_TD: mx.array, shared: Shared, linear: Linear = plain_linear) -> mx.array:
            x_TD = rms_norm(h_TD, weights["layer.0.layer_norm.weight"], eps)
            h_TD = h_TD + _attention(weights, x_TD, shared, linear, heads)
            x_TD = rms_norm(h_TD, weights["layer.1.layer_norm.weight"], eps)
            return h_TD + _feed_forward(weights, x_TD, linear, kind == "gated")

        return layer

    def leave(self, h_TE: mx.array, shared: Shared) -> list[mx.array]:
        """Token vectors (B, L, E) per part: of length 1, or zero for padding."""
        wide_TE = h_TE.astype(mx.float32)
        # The inner maximum keeps the gradient of the root finite at 0.
        unit_TE = wide_TE / mx.maximum(mx.sqrt(mx.maximum((wide_TE * wide_TE).sum(-1, keepdims=True), EPS**2)), EPS)
        parts = _split(unit_TE, shared)
        return [
            x_LE.reshape(*part["real_BL"].shape, -1) * part["real_BL"][:, :, None]
            for x_LE, part in zip(parts, shared, strict=True)
        ]

    def __call__(
        self, ids: Sequence[mx.array], real: Sequence[mx.array], linear_for: Callable[[str], Linear] | None = None
    ) -> list[mx.array]:
        """See `T5`. `linear_for(block name)` gives the `linear` of a block, to apply an adapter."""
        h_TD, shared = self.enter(ids, real)
        for block in self.blocks:
            linear = linear_for(block.name) if linear_for else plain_linear
            h_TD = self.block(block.kind)(block.weights, h_TD, shared, linear)
        return self.leave(h_TD, shared)


def _split(x_TD: mx.array, shared: Shared) -> list[mx.array]:
    ends: list[int] = np.cumsum([part["real_BL"].size for part in shared]).tolist()
    return list(mx.split(x_TD, ends[:-1])) if len(ends) > 1 else [x_TD]


def _attention(weights: Mapping[str, Any], x_TD: mx.array, shared: Shared, linear: Linear, heads: int) -> mx.array:
    def project(name: str) -> list[mx.array]:
        full = f"layer.0.SelfAttention.{name}"
        return _split(linear(full, weights[f"{full}.weight"], x_TD), shared)

    done: list[mx.array] = []
    for q, k, v, part in zip(project("q"), project("k"), project("v"), shared, strict=True):
        B, L = part["real_BL"].shape
        q_BHLK, k_BHLK, v_BHLK = (x.reshape(B, L, heads, -1).swapaxes(1, 2) for x in (q, k, v))
        y_BHLK = attend(q_BHLK, k_BHLK, v_BHLK, part["mask_BHLL"])
        done.append(y_BHLK.swapaxes(1, 2).reshape(B * L, -1))
    y_TD = mx.concatenate(done) if len(done) > 1 else done[0]
    return linear("layer.0.SelfAttention.o", weights["layer.0.SelfAttention.o.weight"], y_TD)


def _feed_forward(weights: Mapping[str, Any], x_TD: mx.array, linear: Linear, gated: bool) -> mx.array:
    def project(name: str, x: mx.array) -> mx.array:
        return linear(f"{DENSE}.{name}", weights[f"{DENSE}.{name}.weight"], x)

    inner_TF = gelu_times(project("wi_0", x_TD), project("wi_1", x_TD)) if gated else mx.maximum(project("wi", x_TD), 0)
    return project("wo", inner_TF)
