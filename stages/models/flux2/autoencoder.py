"""FLUX.2's autoencoder: images to normalised latents and back.

Source: autoencoder.py of the reference repository and the released vae/config.json. Weights have the names of the diffusers
layout. Inside, arrays are channels-last; latents are channels-first, as they are stored. Large images are computed in strips of
rows (rows.py).

B batch, R rows of a strip, H and W image height and width in pixels, C channels, P = H W positions, h = H / 16, w = W / 16,
L latent channels (32),
4 L = 128 channels after patches of 2 x 2 positions are folded into channels.
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
    """Return a weight in the layout that `Autoencoder` takes. Files store a convolution as (out, in, height, width). It becomes
    (out, height, width, in). Any other array is returned unchanged. `key` is the weight's name and is not used.
    """
    return mx.contiguous(array.transpose(0, 2, 3, 1)) if array.ndim == 4 else array


def patchify(z_BHWL: mx.array) -> mx.array:
    """Return a latent with every 2 x 2 patch of positions folded into channels. The channel axis also moves from last
    to second place. `z_BHWL` is (batch, height, width, L channels). The result is (batch, 4 L channels, height / 2,
    width / 2). For example, the shape (1, 64, 96, 32) becomes (1, 128, 32, 48). Height and width must be even.

    Channel l at (row, column) within a 2 x 2 patch becomes channel 4 l + 2 row + column.
    """
    B, H, W, L = z_BHWL.shape
    return z_BHWL.reshape(B, H // 2, 2, W // 2, 2, L).transpose(0, 5, 2, 4, 1, 3).reshape(B, 4 * L, H // 2, W // 2)


def unpatchify(z_BChw: mx.array) -> mx.array:
    """Unfold channels into 2 x 2 positions, the inverse of `patchify`. `z_BChw` is an array (batch, C channels, height,
    width). The result is (batch, 2 height, 2 width, C / 4).
    """
    B, C, h, w = z_BChw.shape
    return z_BChw.reshape(B, C // 4, 2, 2, h, w).transpose(0, 4, 2, 5, 3, 1).reshape(B, 2 * h, 2 * w, C // 4)


class Autoencoder:
    """FLUX.2's autoencoder. `encode` turns images into latents. `decode` turns latents into images. Latents are
    normalised: each channel has about mean 0 and variance 1. Both methods compute in the dtype of the weights.

    Only a few strips of a convolution are computed at once, so that memory peaks at two or three activations of one level. At
    1024 px one activation of the top level takes half a GB in float32.
    """

    def __init__(self, config: AutoencoderConfig, weights: dict[str, mx.array]) -> None:
        """Build the autoencoder from its sizes and weights. `weights` maps every name in `config.shapes()` to an array.
        The weight of a convolution must have the layout (out, height, width, in). Files have another layout. `arrange`
        converts it.
        """
        self.config = config
        self.weights = weights
        self.dtype = weights["encoder.conv_in.weight"].dtype
        self._activate, self._finish = kernels.compiled(normalised_silu), kernels.compiled(finished)
        self._queue = StripQueue()

    def encode(self, images_BHWC: mx.array) -> mx.array:
        """Encode images to normalised latents. images_BHWC is (batch, height, width, 3) with values from -1 to 1. The result is
        (batch, 128, height / 16, width / 16), float32. It is the mean of the posterior, not a sample. Raises ValueError if height
        or width is no multiple of 16.
        """
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
        """Decode normalised latents to images. `latents_BChw` is an array (batch, 128, h, w), as `encode` returns it.
        The result is (batch, 16 h, 16 w, 3), float32. Its values are about -1 to 1 and are not clipped.
        """
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
        """Return (mean, standard deviation) of the latent's channels, each a float32 array (channels, 1, 1). They are read from
        the weights. They serve to normalise the latents.
        """
        mean_C = self.weights["bn.running_mean"].astype(mx.float32)
        var_C = self.weights["bn.running_var"].astype(mx.float32)
        return mean_C[:, None, None], mx.sqrt(var_C + self.config.batch_norm_eps)[:, None, None]

    def _kernel(self, name: str) -> tuple[mx.array, mx.array]:
        return self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]

    def _linear(self, name: str, x_BPC: mx.array) -> mx.array:
        return mx.addmm(self.weights[f"{name}.bias"], x_BPC, self.weights[f"{name}.weight"].T)

    def _conv(self, name: str, x: Rows, *, pad: int = 1, norm: str = "", keep: bool = False, add: Rows | None = None) -> Rows:
        """Compute a convolution with bias and stride 1, and return the resulting activation. `name` is the prefix of
        the names of the convolution's weight and bias. `x` is the input activation. `pad` is the number of zeros added
        at each edge. If `norm` is not empty, a group normalisation and a SiLU are applied to `x` first. `norm` is the
        prefix of the normalisation's weight names. If `keep` is False, `x` cannot be used after the call. `add` is an
        activation to add to the result, or None. `add` cannot be used after the call.

        The convolution is computed in strips of rows. Strips of `add` are freed meanwhile. Strips of `x` are freed too,
        unless `keep` is True.
        """
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
            del part, y
            if not keep:
                x.free_before(last - pad)
            if add is not None:
                add.free_before(last)
        return Rows(strips)

    def _norm(self, name: str, x: Rows) -> tuple[mx.array, ...]:
        """Return `(mean, scale, weight, bias)` of a group normalisation of the activation `x`, all float32. `mean` and
        `scale` have the shape (batch, 1, 1, channels). They are taken over all values of each group of channels.
        `scale` is 1 / standard deviation. `weight` and `bias` have the shape (channels,). `name` is the prefix of their
        names.
        """
        mean_B11C, scale_B11C = group_statistics(x, self.config.norm_num_groups, NORM_EPS, self._queue.start)
        return mean_B11C, scale_B11C, *(self.weights[f"{name}.{part}"].astype(mx.float32) for part in ("weight", "bias"))

    def _resnet(self, name: str, x: Rows) -> Rows:
        h = self._conv(f"{name}.conv1", x, norm=f"{name}.norm1", keep=True)
        if f"{name}.conv_shortcut.weight" in self.weights:
            x = self._conv(f"{name}.conv_shortcut", x, pad=0)
        return self._conv(f"{name}.conv2", h, norm=f"{name}.norm2", add=x)

    def _attention(self, name: str, x: Rows) -> Rows:
        """Return `x` plus its self-attention over all positions. `x` and the result are activations (batch, height,
        width, channels). `name` is the prefix of the names of the weights.

        Its one head is too wide for MLX's fused kernels. To save memory, it is computed for some rows of queries at a
        time.
        """
        x_BHWC = x.take(0, x.height)
        B, H, W, C = x_BHWC.shape
        mean, scale, weight, bias = self._norm(f"{name}.group_norm", x)
        x_BPC = ((x_BHWC.astype(mx.float32) - mean) * scale * weight + bias).astype(self.dtype).reshape(B, H * W, C)
        q_B1PC, k_B1PC, v_B1PC = (self._linear(f"{name}.{part}", x_BPC)[:, None] for part in ("to_q", "to_k", "to_v"))
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
        """Halve the height and width of the activation `x`, and return the result. `name` is the prefix of the names of
        a convolution's weight and bias. One row of zeros is added at the bottom of `x`, and one column of zeros at the
        right. Then this convolution is computed with stride 2. The call frees `x`, which cannot be used again.
        """
        weight, bias = self._kernel(name)
        H, W = x.height // 2, x.width // 2
        strips = []
        for first, last in windows(H, strip_rows(2 * H, 2 * W, x.channels, weight.shape[0]) // 2 or 1):
            part = x.take(2 * first, 2 * last + 1)
            below = 2 * last + 1 - x.height if last == H else 0
            part = mx.pad(part, [(0, 0), (0, below), (0, 1), (0, 0)])
            strips.append(self._queue.start(mx.conv2d(part, weight, stride=2) + bias))
            del part
            x.free_before(2 * last)
        return Rows(strips)

    def _upsample(self, name: str, x: Rows) -> Rows:
        """Double the height and width of the activation `x`. Every position is repeated twice in each direction, and a
        convolution follows. `name` is the prefix of the names of its weights.
        """
        weight, bias = self._kernel(name)
        H, W = 2 * x.height, 2 * x.width
        strips = []
        for first, last in windows(H, strip_rows(H, W, x.channels, weight.shape[0])):
            top, bottom = max(first - 1, 0), min(last + 1, H)
            some_BRWC = x.take(top // 2, -(-bottom // 2))
            B, R, _, C = some_BRWC.shape
            twice = mx.broadcast_to(some_BRWC[:, :, None, :, None], (B, R, 2, W // 2, 2, C)).reshape(B, 2 * R, W, C)
            twice = twice[:, top % 2 : 2 * R - bottom % 2]
            twice = mx.pad(twice, [(0, 0), (int(first == 0), int(last == H)), (0, 0), (0, 0)])
            strips.append(self._queue.start(mx.conv2d(twice, weight, padding=(0, 1)) + bias))
            del some_BRWC, twice
            x.free_before((last - 1) // 2)
        return Rows(strips)


def normalised_silu(
    x_BRWC: mx.array, mean_B11C: mx.array, scale_B11C: mx.array, weight_C: mx.array, bias_C: mx.array
) -> mx.array:
    """Return `silu((x - mean) * scale * weight + bias)` in the dtype of `x_BRWC`. The computation is in float32.
    `x_BRWC` has the shape `(batch, rows, width, channels)`. `mean_B11C` and `scale_B11C` have the shape `(batch, 1, 1,
    channels)`. `scale_B11C` is 1 / standard deviation. `weight_C` and `bias_C` have the shape `(channels,)`.
    """
    return silu((x_BRWC.astype(mx.float32) - mean_B11C) * (scale_B11C * weight_C) + bias_C).astype(x_BRWC.dtype)


def finished(y_BRWC: mx.array, bias_C: mx.array, add_BRWC: mx.array | None = None) -> mx.array:
    """Return `y_BRWC + bias_C + add_BRWC`. `y_BRWC` is the output of a convolution without its bias. `bias_C` is the
    bias. `add_BRWC` is another activation of the same shape. If it is None, only the bias is added. All arguments have
    the same dtype.
    """
    y_BRWC = y_BRWC + bias_C
    return y_BRWC if add_BRWC is None else add_BRWC + y_BRWC


def query_rows(positions: int, channels: int) -> int:
    """Return how many queries the autoencoder's attention computes at once, from 1 to `QUERIES`. Together they take at
    most `kernels.LIMIT` floating-point operations. If one query alone takes more, the result is 1. `positions` is the
    number of keys of all images in the batch together. `channels` is the width of a query.
    """
    return min(QUERIES, max(1, int(kernels.LIMIT // (2 * kernels.product_flop(1, channels, positions)))))
