"""The convolutional autoencoder of FLUX.1 and FLUX.2: images to normalised latents and back. An architecture's subclass folds
patches of 2 x 2 positions into channels, and normalises.

Source: autoencoder.py of FLUX.2's reference repository and the released vae/config.json. Weights have diffusers' names. Arrays
are channels-last inside; latents are channels-first.

Activations of large images are strips of rows, so that a convolution needs memory for one strip at a time. No strip of its input
or output takes more than `strip_bytes()`, no kernel more operations than `kernels.LIMIT`. A convolution reads the rows beside
its strip too, and statistics of a norm are sums over all strips, so results are equal up to rounding.
B batch, R rows of a strip, H and W height and width in pixels, C channels, G groups, P = H W positions, h = H / 16, w = W / 16,
L latent channels; C = 4 L channels after patches of 2 x 2 positions are folded in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx

from stages import kernels
from stages.models.attention import silu
from stages.models.folders import checked_sizes

Shapes = Iterator[tuple[str, tuple[int, ...]]]

FIXED = {"act_fn": "silu", "patch_size": (2, 2)}  # the only supported values of these fields


@dataclass(frozen=True)
class AutoencoderConfig:
    """Fields have the names and meanings of the keys in vae/config.json."""

    model: ClassVar[str] = "text-to-image"  # in messages

    in_channels: int
    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    norm_num_groups: int
    decoder_block_out_channels: tuple[int, ...] | None = None  # None: those of the encoder
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Raises ValueError for a missing key or unsupported value. Keys without influence on the computation are ignored."""
        for key, value in FIXED.items():
            other = content.get(key, value)
            if (tuple(other) if isinstance(other, list) else other) != value:
                raise ValueError(f"autoencoder config: {key} = {other!r} is not supported; expected {value!r}")
        made = cls(**checked_sizes(cls, content, "autoencoder config", cls.model))
        odd = [c for c in (*made.block_out_channels, *made.decoder_channels) if c % made.norm_num_groups]
        if odd:
            raise ValueError(
                f"autoencoder config: channels must be multiples of norm_num_groups {made.norm_num_groups}, got {odd[0]}"
            )
        return made

    @property
    def decoder_channels(self) -> tuple[int, ...]:
        """From the highest resolution to the lowest."""
        return self.decoder_block_out_channels or self.block_out_channels

    @property
    def scale(self) -> int:
        """Pixels per position of the latent, along one side: 16 in released models."""
        # One halving between two levels each, and one by the 2 x 2 patches.
        return int(2 ** len(self.block_out_channels))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes in a file by diffusers' name; a convolution's is (out, in, height, width)."""
        latent = self.latent_channels
        shapes = dict(_encoder(self)) | dict(_decoder(self))
        if self.use_quant_conv:
            shapes |= dict(_conv("quant_conv", 2 * latent, 2 * latent, 1))
        if self.use_post_quant_conv:
            shapes |= dict(_conv("post_quant_conv", latent, latent, 1))
        return shapes


def _conv(name: str, inputs: int, outputs: int, kernel: int = 3) -> Shapes:
    yield f"{name}.weight", (outputs, inputs, kernel, kernel)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, channels: int) -> Shapes:
    yield f"{name}.weight", (channels,)
    yield f"{name}.bias", (channels,)


def _resnet(name: str, inputs: int, outputs: int) -> Shapes:
    yield from _norm(f"{name}.norm1", inputs)
    yield from _conv(f"{name}.conv1", inputs, outputs)
    yield from _norm(f"{name}.norm2", outputs)
    yield from _conv(f"{name}.conv2", outputs, outputs)
    if inputs != outputs:
        yield from _conv(f"{name}.conv_shortcut", inputs, outputs, 1)


def _middle(name: str, channels: int, attention: bool) -> Shapes:
    yield from _resnet(f"{name}.resnets.0", channels, channels)
    yield from _resnet(f"{name}.resnets.1", channels, channels)
    if attention:
        yield from _norm(f"{name}.attentions.0.group_norm", channels)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            yield f"{name}.attentions.0.{part}.weight", (channels, channels)
            yield f"{name}.attentions.0.{part}.bias", (channels,)


def _encoder(config: AutoencoderConfig) -> Shapes:
    channels = config.block_out_channels
    yield from _conv("encoder.conv_in", config.in_channels, channels[0])
    inputs = channels[0]
    for i, outputs in enumerate(channels):
        for j in range(config.layers_per_block):
            yield from _resnet(f"encoder.down_blocks.{i}.resnets.{j}", inputs, outputs)
            inputs = outputs
        if i < len(channels) - 1:
            yield from _conv(f"encoder.down_blocks.{i}.downsamplers.0.conv", outputs, outputs)
    yield from _middle("encoder.mid_block", inputs, config.mid_block_add_attention)
    yield from _norm("encoder.conv_norm_out", inputs)
    yield from _conv("encoder.conv_out", inputs, 2 * config.latent_channels)


def _decoder(config: AutoencoderConfig) -> Shapes:
    channels = config.decoder_channels[::-1]
    yield from _conv("decoder.conv_in", config.latent_channels, channels[0])
    yield from _middle("decoder.mid_block", channels[0], config.mid_block_add_attention)
    inputs = channels[0]
    for i, outputs in enumerate(channels):
        for j in range(config.layers_per_block + 1):
            yield from _resnet(f"decoder.up_blocks.{i}.resnets.{j}", inputs, outputs)
            inputs = outputs
        if i < len(channels) - 1:
            yield from _conv(f"decoder.up_blocks.{i}.upsamplers.0.conv", outputs, outputs)
    yield from _norm("decoder.conv_norm_out", inputs)
    yield from _conv("decoder.conv_out", inputs, config.out_channels)


STRIP_BYTES = 32 << 20  # of one strip of float32 values: 256 x 256 positions of 128 channels
# On a GPU, which smaller strips leave idle: an H200 encodes in half the time of 32 MiB. Exact products gain nothing from large
# strips, and their convolutions need memory in proportion: 3.48 GB in place of 2.10 GB at 1024 px.
GPU_STRIP_BYTES = 128 << 20
ITEM = 4  # bytes: strips have the same rows in every dtype
IN_FLIGHT = 2  # strips of full size that a GPU has started and not finished: one is computed while the next is prepared


class StripQueue:
    """Strips in computation: on a GPU, unfinished ones take at most two strips of full size; on a CPU each is waited for."""

    def __init__(self) -> None:
        self.started: deque[tuple[mx.array, int]] = deque()  # with the values that its computation holds
        self.values = 0

    def start(self, x: mx.array, work: int = 0) -> mx.array:
        """Start computing `x`. `work`: values that its computation holds, if more than those of `x`."""
        kernels.dispatch(x)
        self.started.append((x, max(x.size, work)))
        self.values += self.started[-1][1]
        # Without a limit, all strips would be in memory at once. If every strip was waited for, a GPU would be idle between
        # two. Far from the image's own resolution an activation is one small strip, so that a GPU is handed many layers
        # ahead.
        newest, most = (1, IN_FLIGHT * strip_bytes() // ITEM) if kernels.compiles() else (0, 0)  # not waited for
        while len(self.started) > newest and self.values > most:
            oldest, values = self.started.popleft()
            self.values -= values
            mx.eval(oldest)
        return x

    def clear(self) -> None:
        self.started.clear()
        self.values = 0


class Rows:
    """An activation (B, H, W, C) as strips, from top to bottom."""

    def __init__(self, strips: list[mx.array]) -> None:
        self.strips: list[mx.array | None] = list(strips)
        self.starts = [0]
        for strip in strips:
            self.starts.append(self.starts[-1] + strip.shape[1])
        self.width, self.channels = strips[0].shape[2:]

    @property
    def height(self) -> int:
        return self.starts[-1]

    def take(self, first: int, last: int) -> mx.array:
        """Rows `first` to `last` (exclusive) as one array; those that do not exist are left out."""
        first, last = max(first, 0), min(last, self.height)
        parts = []
        for at, strip in enumerate(self.strips):
            start, end = max(first, self.starts[at]), min(last, self.starts[at + 1])
            if start >= end:
                continue
            assert strip is not None, "a strip was freed too early"
            whole = (start, end) == (self.starts[at], self.starts[at + 1])
            parts.append(strip if whole else strip[:, start - self.starts[at] : end - self.starts[at]])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def free_before(self, row: int) -> None:
        for at, end in enumerate(self.starts[1:]):
            if end <= row:
                self.strips[at] = None

    def present(self) -> Iterator[mx.array]:
        for strip in self.strips:
            assert strip is not None, "a strip was freed too early"
            yield strip


def strip_bytes(exact: bool | None = None) -> int:
    """Most bytes of a strip in float32. `exact` products: None is `kernels.exact()`."""
    exact = kernels.exact() if exact is None else exact
    return GPU_STRIP_BYTES if kernels.compiles() and not exact else STRIP_BYTES


def strip_rows(height: int, width: int, inputs: int, outputs: int, kernel: int = 3, exact: bool | None = None) -> int:
    """Output rows that a convolution computes at once, within `strip_bytes` and `kernels.LIMIT`, at least 1."""
    by_bytes = strip_bytes(exact) // (ITEM * width * max(inputs, outputs))
    by_operations = kernels.LIMIT // kernels.product_flop(width, kernel * kernel * inputs, outputs)
    most = max(1, int(min(by_bytes, by_operations)))
    # Strips of about equal height.
    return -(-height // -(-height // most))


def windows(height: int, rows: int) -> Iterator[tuple[int, int]]:
    for first in range(0, height, rows):
        yield first, min(first + rows, height)


def group_statistics(x: Rows, groups: int, eps: float, start: Callable[[mx.array, int], mx.array]) -> tuple[mx.array, mx.array]:
    """(mean, 1 / standard deviation) of a group norm, float32 (B, 1, 1, C)."""
    count = x.height * x.width * x.channels // groups
    squares = kernels.compiled(_squares)
    # `start`, of a StripQueue, waits for earlier strips: only a few are in memory at once.
    total_BC = sum((start(_sum(strip), strip.size) for strip in x.present()), start=mx.array(0.0))
    mean_BG = total_BC.reshape(total_BC.shape[0], groups, -1).sum(-1) / count
    mean_B11C = mx.repeat(mean_BG, x.channels // groups, axis=-1)[:, None, None]
    square_BC = sum((start(squares(strip, mean_B11C), strip.size) for strip in x.present()), start=mx.array(0.0))
    var_BG = square_BC.reshape(square_BC.shape[0], groups, -1).sum(-1) / count
    scale_BG = mx.rsqrt(var_BG + eps)
    return mean_B11C, mx.repeat(scale_BG, x.channels // groups, axis=-1)[:, None, None]


def _sum(x_BRWC: mx.array) -> mx.array:
    # Columns first: one long sum of float32 values would lose digits.
    return x_BRWC.astype(mx.float32).sum(2).sum(1)


def _squares(x_BRWC: mx.array, mean_B11C: mx.array) -> mx.array:
    return mx.square(x_BRWC.astype(mx.float32) - mean_B11C).sum(2).sum(1)


NORM_EPS = 1e-6  # of every group normalisation; it is not in the config
QUERIES = 4096  # rows of attention at once: four passes at 1024 px, with 0.27 GB of scores each instead of 1.07 GB


def arrange(key: str, array: mx.array) -> mx.array:
    """A convolution's weight from (out, in, height, width), as files store it, to (out, height, width, in)."""
    return mx.contiguous(array.transpose(0, 2, 3, 1)) if array.ndim == 4 else array


class Autoencoder:
    """Computes in the dtype of the weights, in strips: memory peaks at two or three activations of one level."""

    def __init__(self, config: AutoencoderConfig, weights: dict[str, mx.array]) -> None:
        """`weights`: every name in `config.shapes()`, as `arrange` returns it."""
        self.config = config
        self.weights = weights
        self.dtype = weights["encoder.conv_in.weight"].dtype
        self._activate, self._finish = kernels.compiled(normalised_silu), kernels.compiled(finished)
        # At 1024 px one activation of the top level takes half a GB in float32: few strips are computed at once.
        self._queue = StripQueue()

    def encode(self, images_BHWC: mx.array) -> mx.array:
        """(B, H, W, 3) from -1 to 1 -> float32 (B, C, h, w), the posterior's mean. ValueError if 16 does not divide a side."""
        H, W = images_BHWC.shape[1:3]
        if H % self.config.scale or W % self.config.scale:
            raise ValueError(f"width and height of an image must be multiples of {self.config.scale} pixels, got {W} x {H}")
        x = self._conv("encoder.conv_in", Rows([images_BHWC.astype(self.dtype)]))
        levels = len(self.config.block_out_channels)
        for i in range(levels):
            for j in range(self.config.layers_per_block):
                x = self._resnet(f"encoder.down_blocks.{i}.resnets.{j}", x)
            if i < levels - 1:
                x = self._downsample(f"encoder.down_blocks.{i}.downsamplers.0.conv", x)
        x = self._middle("encoder.mid_block", x)
        x = self._conv("encoder.conv_out", x, norm="encoder.conv_norm_out")
        if self.config.use_quant_conv:
            x = self._conv("quant_conv", x, pad=0)
        mean_BHWL = x.take(0, x.height)[..., : self.config.latent_channels].astype(mx.float32)
        self._queue.clear()
        return self.fold(mean_BHWL)

    def decode(self, latents_BChw: mx.array) -> mx.array:
        """(B, C, h, w) -> float32 (B, H, W, 3), about -1 to 1, not clipped."""
        x = Rows([self.unfold(latents_BChw.astype(mx.float32)).astype(self.dtype)])
        if self.config.use_post_quant_conv:
            x = self._conv("post_quant_conv", x, pad=0)
        x = self._middle("decoder.mid_block", self._conv("decoder.conv_in", x))
        levels = len(self.config.decoder_channels)
        for i in range(levels):
            for j in range(self.config.layers_per_block + 1):
                x = self._resnet(f"decoder.up_blocks.{i}.resnets.{j}", x)
            if i < levels - 1:
                x = self._upsample(f"decoder.up_blocks.{i}.upsamplers.0.conv", x)
        x = self._conv("decoder.conv_out", x, norm="decoder.conv_norm_out")
        self._queue.clear()
        return x.take(0, x.height).astype(mx.float32)

    def fold(self, z_BHWL: mx.array) -> mx.array:
        """Normalised latents (B, C, H / 2, W / 2), float32, of what the convolutions encode."""
        raise NotImplementedError

    def unfold(self, latents_BChw: mx.array) -> mx.array:
        """The inverse of `fold`."""
        raise NotImplementedError

    def _kernel(self, name: str) -> tuple[mx.array, mx.array]:
        return self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]

    def _linear(self, name: str, x_BPC: mx.array) -> mx.array:
        return mx.addmm(self.weights[f"{name}.bias"], x_BPC, self.weights[f"{name}.weight"].T)

    def _conv(self, name: str, x: Rows, *, pad: int = 1, norm: str = "", keep: bool = False, add: Rows | None = None) -> Rows:
        """A convolution of stride 1, after the group norm `norm` and SiLU if one is named. Frees `add`, and `x` unless `keep`."""
        weight, bias = self._kernel(name)
        H, outputs = x.height, weight.shape[0]
        about = self._norm(norm, x) if norm else None
        strips = []
        for first, last in windows(H, strip_rows(H, x.width, x.channels, outputs, weight.shape[1])):
            part = x.take(first - pad, last + pad)
            part = self._activate(part, *about) if about else part
            above, below = max(0, pad - first), max(0, last + pad - H)
            if above != below:  # one strip of several: zeros on one side only
                part = mx.pad(part, [(0, 0), (above, below), (0, 0), (0, 0)])
                above = 0
            y = mx.conv2d(part, weight, padding=(above, pad))
            y = self._finish(y, bias, *(() if add is None else (add.take(first, last),)))
            strips.append(self._queue.start(y))
            # Else the names would hold this strip while the next is computed.
            del part, y
            if not keep:
                x.free_before(last - pad)
            if add is not None:
                add.free_before(last)
        return Rows(strips)

    def _norm(self, name: str, x: Rows) -> tuple[mx.array, ...]:
        mean_B11C, scale_B11C = group_statistics(x, self.config.norm_num_groups, NORM_EPS, self._queue.start)
        return mean_B11C, scale_B11C, *(self.weights[f"{name}.{part}"].astype(mx.float32) for part in ("weight", "bias"))

    def _resnet(self, name: str, x: Rows) -> Rows:
        h = self._conv(f"{name}.conv1", x, norm=f"{name}.norm1", keep=True)
        if f"{name}.conv_shortcut.weight" in self.weights:
            x = self._conv(f"{name}.conv_shortcut", x, pad=0)
        return self._conv(f"{name}.conv2", h, norm=f"{name}.norm2", add=x)

    def _attention(self, name: str, x: Rows) -> Rows:
        x_BHWC = x.take(0, x.height)
        B, H, W, C = x_BHWC.shape
        mean, scale, weight, bias = self._norm(f"{name}.group_norm", x)
        x_BPC = ((x_BHWC.astype(mx.float32) - mean) * scale * weight + bias).astype(self.dtype).reshape(B, H * W, C)
        q_B1PC, k_B1PC, v_B1PC = (self._linear(f"{name}.{part}", x_BPC)[:, None] for part in ("to_q", "to_k", "to_v"))
        # One head, too wide for MLX's fused kernels: for some rows of queries at a time, to save memory.
        parts = []
        Q = query_rows(B * H * W, C)
        for start in range(0, H * W, Q):
            some_B1QC = q_B1PC[:, :, start : start + Q]
            part = mx.fast.scaled_dot_product_attention(some_B1QC, k_B1PC, v_B1PC, scale=C**-0.5)
            parts.append(self._queue.start(part, some_B1QC.shape[2] * B * H * W))
        out_BPC = mx.concatenate(parts, axis=2)[:, 0]
        return Rows([self._queue.start(x_BHWC + self._linear(f"{name}.to_out.0", out_BPC).reshape(B, H, W, C))])

    def _middle(self, name: str, x: Rows) -> Rows:
        x = self._resnet(f"{name}.resnets.0", x)
        if self.config.mid_block_add_attention:
            x = self._attention(f"{name}.attentions.0", x)
        return self._resnet(f"{name}.resnets.1", x)

    def _downsample(self, name: str, x: Rows) -> Rows:
        weight, bias = self._kernel(name)
        H, W = x.height // 2, x.width // 2
        strips = []
        for first, last in windows(H, strip_rows(2 * H, 2 * W, x.channels, weight.shape[0]) // 2 or 1):
            part = x.take(2 * first, 2 * last + 1)
            below = 2 * last + 1 - x.height if last == H else 0
            # Zeros at the bottom and at the right only.
            part = mx.pad(part, [(0, 0), (0, below), (0, 1), (0, 0)])
            strips.append(self._queue.start(mx.conv2d(part, weight, stride=2) + bias))
            del part
            x.free_before(2 * last)
        return Rows(strips)

    def _upsample(self, name: str, x: Rows) -> Rows:
        weight, bias = self._kernel(name)
        H, W = 2 * x.height, 2 * x.width
        strips = []
        for first, last in windows(H, strip_rows(H, W, x.channels, weight.shape[0])):
            top, bottom = max(first - 1, 0), min(last + 1, H)
            some_BRWC = x.take(top // 2, -(-bottom // 2))
            B, R, _, C = some_BRWC.shape
            # Every position twice in each direction.
            twice = mx.broadcast_to(some_BRWC[:, :, None, :, None], (B, R, 2, W // 2, 2, C)).reshape(B, 2 * R, W, C)
            # A window may begin or end between the two copies of a row.
            twice = twice[:, top % 2 : 2 * R - bottom % 2]
            twice = mx.pad(twice, [(0, 0), (int(first == 0), int(last == H)), (0, 0), (0, 0)])
            strips.append(self._queue.start(mx.conv2d(twice, weight, padding=(0, 1)) + bias))
            del some_BRWC, twice
            x.free_before((last - 1) // 2)
        return Rows(strips)


def normalised_silu(
    x_BRWC: mx.array, mean_B11C: mx.array, scale_B11C: mx.array, weight_C: mx.array, bias_C: mx.array
) -> mx.array:
    """Computed in float32. `scale_B11C` is 1 / standard deviation."""
    return silu((x_BRWC.astype(mx.float32) - mean_B11C) * (scale_B11C * weight_C) + bias_C).astype(x_BRWC.dtype)


def finished(y_BRWC: mx.array, bias_C: mx.array, add_BRWC: mx.array | None = None) -> mx.array:
    y_BRWC = y_BRWC + bias_C
    return y_BRWC if add_BRWC is None else add_BRWC + y_BRWC


def query_rows(positions: int, channels: int) -> int:
    return min(QUERIES, max(1, int(kernels.LIMIT // (2 * kernels.product_flop(1, channels, positions)))))
