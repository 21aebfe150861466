"""FLUX.2's autoencoder: images to normalised latents and back.

Source: autoencoder.py of the reference repository and the released vae/config.json. Weights have the names of the diffusers
layout. Inside, arrays are channels-last; latents are channels-first, as they are stored.

B batch, H and W image height and width in pixels, C channels, P = H W positions, h = H / 16, w = W / 16, L latent channels (32),
4 L = 128 channels after patches of 2 x 2 positions are folded into channels.
"""

from __future__ import annotations

import mlx.core as mx

from stages.models.flux2.autoencoder_config import AutoencoderConfig
from stages.models.flux2.layers import silu

NORM_EPS = 1e-6  # of every group normalisation; it is not in the config
QUERIES = 4096  # rows of attention at once: four passes at 1024 px, with 0.27 GB of scores each instead of 1.07 GB


def arrange(key: str, array: mx.array) -> mx.array:
    """Return a weight in the layout that `Autoencoder` takes. Files store a convolution as (out, in, height, width). It becomes
    (out, height, width, in). Any other array is returned unchanged. `key` is the weight's name and is not used.
    """
    return mx.contiguous(array.transpose(0, 2, 3, 1)) if array.ndim == 4 else array


def patchify(z_BHWL: mx.array) -> mx.array:
    """Fold every 2 x 2 positions of a latent into channels. z_BHWL is (batch, height, width, L channels). The result is (batch, 4
    L, height / 2, width / 2).

    Channel l at (row, column) within a 2 x 2 patch becomes channel 4 l + 2 row + column.
    """
    B, H, W, L = z_BHWL.shape
    return z_BHWL.reshape(B, H // 2, 2, W // 2, 2, L).transpose(0, 5, 2, 4, 1, 3).reshape(B, 4 * L, H // 2, W // 2)


def unpatchify(z_BChw: mx.array) -> mx.array:
    """Unfold channels into 2 x 2 positions, the inverse of `patchify`. z_BChw is (batch, C channels, height, width). The result
    is (batch, 2 height, 2 width, C / 4).
    """
    B, C, h, w = z_BChw.shape
    return z_BChw.reshape(B, C // 4, 2, 2, h, w).transpose(0, 4, 2, 5, 3, 1).reshape(B, 2 * h, 2 * w, C // 4)


class Autoencoder:
    """FLUX.2's autoencoder. `encode` turns images into normalised latents. `decode` turns latents into images. It computes in the
    dtype of its weights.

    Every group of layers is evaluated before the next one is built, so that memory peaks at a few activations of one level. At
    1024 px one activation of the top level takes half a GB in float32.
    """

    def __init__(self, config: AutoencoderConfig, weights: dict[str, mx.array]) -> None:
        """Build the autoencoder from its sizes and weights. `weights` maps every name in `config.shapes()` to its array. Each
        array has the layout that `arrange` returns.
        """
        self.config = config
        self.weights = weights
        self.dtype = weights["encoder.conv_in.weight"].dtype

    def encode(self, images_BHWC: mx.array) -> mx.array:
        """Encode images to normalised latents. images_BHWC is (batch, height, width, 3) with values from -1 to 1. The result is
        (batch, 128, height / 16, width / 16), float32. It is the mean of the posterior, not a sample. Raises ValueError if height
        or width is no multiple of 16.
        """
        H, W = images_BHWC.shape[1:3]
        if H % self.config.scale or W % self.config.scale:
            raise ValueError(f"width and height of an image must be multiples of {self.config.scale} pixels, got {W} x {H}")
        x_BHWC = self._conv("encoder.conv_in", images_BHWC.astype(self.dtype))
        levels = len(self.config.block_out_channels)
        for i in range(levels):
            for j in range(self.config.layers_per_block):
                x_BHWC = self._resnet(f"encoder.down_blocks.{i}.resnets.{j}", x_BHWC)
            if i < levels - 1:
                x_BHWC = self._downsample(f"encoder.down_blocks.{i}.downsamplers.0.conv", x_BHWC)
        x_BHWC = self._middle("encoder.mid_block", x_BHWC)
        x_BHWC = self._conv("encoder.conv_out", silu(self._norm("encoder.conv_norm_out", x_BHWC)))
        if self.config.use_quant_conv:
            x_BHWC = self._conv("quant_conv", x_BHWC, pad=0)
        mean_BHWL = x_BHWC[..., : self.config.latent_channels].astype(mx.float32)
        center_C, spread_C = self._statistics()
        return (patchify(mean_BHWL) - center_C) / spread_C

    def decode(self, latents_BChw: mx.array) -> mx.array:
        """Decode normalised latents to images. latents_BChw is (batch, 128, h, w). The result is (batch, 16 h, 16 w, 3), float32.
        Its values are about -1 to 1 and are not clipped.
        """
        center_C, spread_C = self._statistics()
        z_BHWL = unpatchify(latents_BChw.astype(mx.float32) * spread_C + center_C).astype(self.dtype)
        if self.config.use_post_quant_conv:
            z_BHWL = self._conv("post_quant_conv", z_BHWL, pad=0)
        x_BHWC = self._middle("decoder.mid_block", self._conv("decoder.conv_in", z_BHWL))
        levels = len(self.config.decoder_channels)
        for i in range(levels):
            for j in range(self.config.layers_per_block + 1):
                x_BHWC = self._resnet(f"decoder.up_blocks.{i}.resnets.{j}", x_BHWC)
            if i < levels - 1:
                x_BHWC = self._upsample(f"decoder.up_blocks.{i}.upsamplers.0.conv", x_BHWC)
        x_BHWC = self._conv("decoder.conv_out", silu(self._norm("decoder.conv_norm_out", x_BHWC)))
        return x_BHWC.astype(mx.float32)

    def _statistics(self) -> tuple[mx.array, mx.array]:
        """Return (mean, standard deviation) of the latent's channels, each a float32 array (channels, 1, 1). They are read from
        the weights. They serve to normalise the latents.
        """
        mean_C = self.weights["bn.running_mean"].astype(mx.float32)
        var_C = self.weights["bn.running_var"].astype(mx.float32)
        return mean_C[:, None, None], mx.sqrt(var_C + self.config.batch_norm_eps)[:, None, None]

    def _conv(self, name: str, x_BHWC: mx.array, *, stride: int = 1, pad: int = 1) -> mx.array:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return mx.conv2d(x_BHWC, weight, stride=stride, padding=pad) + bias

    def _linear(self, name: str, x_BPC: mx.array) -> mx.array:
        return mx.addmm(self.weights[f"{name}.bias"], x_BPC, self.weights[f"{name}.weight"].T)

    def _norm(self, name: str, x_BHWC: mx.array) -> mx.array:
        """Apply the group normalisation called `name` to x_BHWC, (batch, height, width, channels). Each group of channels is
        normalised over all positions.
        """
        B, H, W, C = x_BHWC.shape
        G = self.config.norm_num_groups
        x_BGP = x_BHWC.reshape(B, H * W, G, C // G).transpose(0, 2, 1, 3).reshape(B, G, -1)
        x_BGP = mx.fast.layer_norm(x_BGP, None, None, NORM_EPS)
        x_BHWC = x_BGP.reshape(B, G, H * W, C // G).transpose(0, 2, 1, 3).reshape(B, H, W, C)
        return x_BHWC * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _resnet(self, name: str, x_BHWC: mx.array) -> mx.array:
        h_BHWC = _evaluated(self._conv(f"{name}.conv1", silu(self._norm(f"{name}.norm1", x_BHWC))))
        h_BHWC = self._conv(f"{name}.conv2", silu(self._norm(f"{name}.norm2", h_BHWC)))
        if f"{name}.conv_shortcut.weight" in self.weights:
            x_BHWC = self._conv(f"{name}.conv_shortcut", x_BHWC, pad=0)
        return _evaluated(x_BHWC + h_BHWC)

    def _attention(self, name: str, x_BHWC: mx.array) -> mx.array:
        """Add self-attention over all positions to x_BHWC, (batch, height, width, channels). `name` is the prefix of its weights'
        names.

        Its one head is too wide for MLX's fused kernels. To save memory, it is computed for QUERIES rows of queries at a time.
        """
        B, H, W, C = x_BHWC.shape
        x_BPC = self._norm(f"{name}.group_norm", x_BHWC).reshape(B, H * W, C)
        q_B1PC, k_B1PC, v_B1PC = (self._linear(f"{name}.{part}", x_BPC)[:, None] for part in ("to_q", "to_k", "to_v"))
        parts = []
        for start in range(0, H * W, QUERIES):
            some_B1QC = q_B1PC[:, :, start : start + QUERIES]
            parts.append(_evaluated(mx.fast.scaled_dot_product_attention(some_B1QC, k_B1PC, v_B1PC, scale=C**-0.5)))
        out_BPC = mx.concatenate(parts, axis=2)[:, 0]
        return _evaluated(x_BHWC + self._linear(f"{name}.to_out.0", out_BPC).reshape(B, H, W, C))

    def _middle(self, name: str, x_BHWC: mx.array) -> mx.array:
        x_BHWC = self._resnet(f"{name}.resnets.0", x_BHWC)
        if self.config.mid_block_add_attention:
            x_BHWC = self._attention(f"{name}.attentions.0", x_BHWC)
        return self._resnet(f"{name}.resnets.1", x_BHWC)

    def _downsample(self, name: str, x_BHWC: mx.array) -> mx.array:
        """Halve height and width by the convolution `name` with stride 2. x_BHWC is (batch, height, width, channels). Only the
        bottom and the right side of the input are padded, by one row and one column.
        """
        x_BHWC = mx.pad(x_BHWC, [(0, 0), (0, 1), (0, 1), (0, 0)])
        return _evaluated(self._conv(name, x_BHWC, stride=2, pad=0))

    def _upsample(self, name: str, x_BHWC: mx.array) -> mx.array:
        """Double height and width: repeat every position, then apply the convolution `name`. x_BHWC is (batch, height, width,
        channels).
        """
        B, H, W, C = x_BHWC.shape
        twice = mx.broadcast_to(x_BHWC[:, :, None, :, None], (B, H, 2, W, 2, C)).reshape(B, 2 * H, 2 * W, C)
        return _evaluated(self._conv(name, twice))


def _evaluated(x: mx.array) -> mx.array:
    """Evaluate the lazy array `x` and return it. MLX can then free the arrays from which `x` was computed."""
    mx.eval(x)
    return x
