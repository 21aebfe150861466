"""FLUX.2's autoencoder: images to normalised latents and back.

Source: autoencoder.py of the reference repository and the released vae/config.json. Weights have diffusers' names. Arrays are
channels-last inside; latents are channels-first. Large images are computed in strips of rows (rows.py).
B batch, R rows of a strip, H and W height and width in pixels, C channels, P = H W positions, h = H / 16, w = W / 16,
L latent channels (32); 4 L = 128 channels after patches of 2 x 2 positions are folded in.
"""

from __future__ import annotations

import mlx.core as mx

from stages import kernels
from stages.models.elementwise import silu
from stages.models.flux2.autoencoder_config import AutoencoderConfig
from stages.models.flux2.rows import Rows, StripQueue, group_statistics, strip_rows, windows

NORM_EPS = 1e-6  # of every group normalisation; it is not in the config
QUERIES = 4096  # rows of attention at once: four passes at 1024 px, with 0.27 GB of scores each instead of 1.07 GB


def arrange(key: str, array: mx.array) -> mx.array:
    """A convolution's weight from (out, in, height, width), as files store it, to (out, height, width, in)."""
    return mx.contiguous(array.transpose(0, 2, 3, 1)) if array.ndim == 4 else array


def patchify(z_BHWL: mx.array) -> mx.array:
    """(B, H, W, L) -> (B, 4 L, H / 2, W / 2); channel l at (row, column) of a patch becomes 4 l + 2 row + column."""
    B, H, W, L = z_BHWL.shape
    return z_BHWL.reshape(B, H // 2, 2, W // 2, 2, L).transpose(0, 5, 2, 4, 1, 3).reshape(B, 4 * L, H // 2, W // 2)


def unpatchify(z_BChw: mx.array) -> mx.array:
    """The inverse of `patchify`."""
    B, C, h, w = z_BChw.shape
    return z_BChw.reshape(B, C // 4, 2, 2, h, w).transpose(0, 4, 2, 5, 3, 1).reshape(B, 2 * h, 2 * w, C // 4)


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
        """(B, H, W, 3) from -1 to 1 -> float32 (B, 128, h, w), the posterior's mean. ValueError if 16 does not divide a side."""
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
        center_C, spread_C = self._statistics()
        return (patchify(mean_BHWL) - center_C) / spread_C

    def decode(self, latents_BChw: mx.array) -> mx.array:
        """(B, 128, h, w) -> float32 (B, H, W, 3), about -1 to 1, not clipped."""
        center_C, spread_C = self._statistics()
        x = Rows([unpatchify(latents_BChw.astype(mx.float32) * spread_C + center_C).astype(self.dtype)])
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

    def _statistics(self) -> tuple[mx.array, mx.array]:
        mean_C = self.weights["bn.running_mean"].astype(mx.float32)
        var_C = self.weights["bn.running_var"].astype(mx.float32)
        return mean_C[:, None, None], mx.sqrt(var_C + self.config.batch_norm_eps)[:, None, None]

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
    """Queries that attention computes at once: at most `QUERIES`, and `kernels.LIMIT` operations, but at least 1."""
    return min(QUERIES, max(1, int(kernels.LIMIT // (2 * kernels.product_flop(1, channels, positions)))))
