"""FLUX.2's autoencoder: images to normalised latents and back.

Source: the reference repository's autoencoder.py and the released vae/config.json; parameters keep the names of the
diffusers layout. Inside, arrays are channels-last; latents leave channels-first, as they are stored.

B batch   H, W image height and width, pixels, multiples of 16   C channels   P = H*W pixels or positions
h, w = H/16, W/16   L latent channels (32); 4L = 128 after the 2x2 patches are folded into channels
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import mlx.core as mx

NORM_EPS = 1e-6  # of every group normalisation; not in the config
QUERIES = 4096  # attention rows at once: at 1024 px four times, 0.27 GB of scores each instead of 1.07
FIXED = {"act_fn": "silu", "patch_size": (2, 2)}  # what this code does; a config that says otherwise is refused


@dataclass(frozen=True)
class AutoencoderConfig:
    """Sizes, named as in vae/config.json."""

    in_channels: int
    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    norm_num_groups: int
    decoder_block_out_channels: tuple[int, ...] | None = None  # None: as the encoder's
    batch_norm_eps: float = 1e-4
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> AutoencoderConfig:
        """From a config file's values; those that do not change the arithmetic are passed over."""
        for key, value in FIXED.items():
            other = found.get(key, value)
            if (tuple(other) if isinstance(other, list) else other) != value:
                raise ValueError(f"autoencoder config: {key} = {other!r} is not supported; expected {value!r}")
        said = {f.name: found[f.name] for f in fields(cls) if f.name in found}
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items()}
        missing = [f.name for f in fields(cls) if f.name not in known and f.default is MISSING]
        if missing:
            raise ValueError(f"autoencoder config lacks {', '.join(missing)}")
        return cls(**known)

    @property
    def decoder_channels(self) -> tuple[int, ...]:
        """Channels of the decoder's levels, highest resolution first."""
        return self.decoder_block_out_channels or self.block_out_channels

    @property
    def scale(self) -> int:
        """Pixels per latent position along one side: 16."""
        return int(2 ** len(self.block_out_channels))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a file in the diffusers layout (convolutions out, in, height, width)."""
        latent = self.latent_channels
        shapes = dict(_encoder(self)) | dict(_decoder(self))
        if self.use_quant_conv:
            shapes |= dict(_conv("quant_conv", 2 * latent, 2 * latent, 1))
        if self.use_post_quant_conv:
            shapes |= dict(_conv("post_quant_conv", latent, latent, 1))
        return shapes | {"bn.running_mean": (4 * latent,), "bn.running_var": (4 * latent,)}


Shapes = Iterator[tuple[str, tuple[int, ...]]]


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


def arrange(key: str, array: mx.array) -> mx.array:
    """A tensor of the file as the code here wants it: convolutions out, height, width, in."""
    return mx.contiguous(array.transpose(0, 2, 3, 1)) if array.ndim == 4 else array


def patchify(z_BHWL: mx.array) -> mx.array:
    """Folds 2x2 positions into channels (channel = 4 l + 2 row + column) and puts channels first: B, 4L, h, w."""
    B, H, W, L = z_BHWL.shape
    return z_BHWL.reshape(B, H // 2, 2, W // 2, 2, L).transpose(0, 5, 2, 4, 1, 3).reshape(B, 4 * L, H // 2, W // 2)


def unpatchify(z_BChw: mx.array) -> mx.array:
    """The reverse of `patchify`."""
    B, C, h, w = z_BChw.shape
    return z_BChw.reshape(B, C // 4, 2, 2, h, w).transpose(0, 4, 2, 5, 3, 1).reshape(B, 2 * h, 2 * w, C // 4)


class Autoencoder:
    """The autoencoder over its arrays (diffusers names, passed through `arrange`), computing in their dtype.

    Every layer group is evaluated before the next is built, so that the peak is a few activations of one level
    rather than a graph of all: at 1024 px one activation of the top level is half a GB in float32.
    """

    def __init__(self, config: AutoencoderConfig, weights: dict[str, mx.array]) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights["encoder.conv_in.weight"].dtype

    def encode(self, images_BHWC: mx.array) -> mx.array:
        """Images in [-1, 1] to normalised latents B, 4L, h, w, float32: the posterior's mean, not a draw from it."""
        H, W = images_BHWC.shape[1:3]
        if H % self.config.scale or W % self.config.scale:
            raise ValueError(f"an image of {W} x {H} pixels cannot be encoded: both must be multiples of {self.config.scale}")
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
        """Normalised latents to images B, H, W, 3, float32, about [-1, 1] but not clipped."""
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
        """The normalisation of the 4L folded channels: mean and standard deviation, each 4L, 1, 1."""
        mean_C = self.weights["bn.running_mean"].astype(mx.float32)
        var_C = self.weights["bn.running_var"].astype(mx.float32)
        return mean_C[:, None, None], mx.sqrt(var_C + self.config.batch_norm_eps)[:, None, None]

    def _conv(self, name: str, x_BHWC: mx.array, *, stride: int = 1, pad: int = 1) -> mx.array:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return mx.conv2d(x_BHWC, weight, stride=stride, padding=pad) + bias

    def _linear(self, name: str, x_BPC: mx.array) -> mx.array:
        return mx.addmm(self.weights[f"{name}.bias"], x_BPC, self.weights[f"{name}.weight"].T)

    def _norm(self, name: str, x_BHWC: mx.array) -> mx.array:
        """Group normalisation: a layer normalisation of each group's channels at all positions."""
        B, H, W, C = x_BHWC.shape
        G = self.config.norm_num_groups
        x_BGP = x_BHWC.reshape(B, H * W, G, C // G).transpose(0, 2, 1, 3).reshape(B, G, -1)
        x_BGP = mx.fast.layer_norm(x_BGP, None, None, NORM_EPS)
        x_BHWC = x_BGP.reshape(B, G, H * W, C // G).transpose(0, 2, 1, 3).reshape(B, H, W, C)
        return x_BHWC * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _resnet(self, name: str, x_BHWC: mx.array) -> mx.array:
        h_BHWC = _done(self._conv(f"{name}.conv1", silu(self._norm(f"{name}.norm1", x_BHWC))))
        h_BHWC = self._conv(f"{name}.conv2", silu(self._norm(f"{name}.norm2", h_BHWC)))
        if f"{name}.conv_shortcut.weight" in self.weights:
            x_BHWC = self._conv(f"{name}.conv_shortcut", x_BHWC, pad=0)
        return _done(x_BHWC + h_BHWC)

    def _attention(self, name: str, x_BHWC: mx.array) -> mx.array:
        """One head over all positions, as wide as the channels: too wide for fused kernels, so scores exist in memory."""
        B, H, W, C = x_BHWC.shape
        x_BPC = self._norm(f"{name}.group_norm", x_BHWC).reshape(B, H * W, C)
        q_B1PC, k_B1PC, v_B1PC = (self._linear(f"{name}.{part}", x_BPC)[:, None] for part in ("to_q", "to_k", "to_v"))
        parts = []
        for start in range(0, H * W, QUERIES):
            some_B1QC = q_B1PC[:, :, start : start + QUERIES]
            parts.append(_done(mx.fast.scaled_dot_product_attention(some_B1QC, k_B1PC, v_B1PC, scale=C**-0.5)))
        out_BPC = mx.concatenate(parts, axis=2)[:, 0]
        return _done(x_BHWC + self._linear(f"{name}.to_out.0", out_BPC).reshape(B, H, W, C))

    def _middle(self, name: str, x_BHWC: mx.array) -> mx.array:
        x_BHWC = self._resnet(f"{name}.resnets.0", x_BHWC)
        if self.config.mid_block_add_attention:
            x_BHWC = self._attention(f"{name}.attentions.0", x_BHWC)
        return self._resnet(f"{name}.resnets.1", x_BHWC)

    def _downsample(self, name: str, x_BHWC: mx.array) -> mx.array:
        """Half the size; the padding is one row below and one column right only."""
        x_BHWC = mx.pad(x_BHWC, [(0, 0), (0, 1), (0, 1), (0, 0)])
        return _done(self._conv(name, x_BHWC, stride=2, pad=0))

    def _upsample(self, name: str, x_BHWC: mx.array) -> mx.array:
        """Twice the size: every position repeated, then a convolution."""
        B, H, W, C = x_BHWC.shape
        twice = mx.broadcast_to(x_BHWC[:, :, None, :, None], (B, H, 2, W, 2, C)).reshape(B, 2 * H, 2 * W, C)
        return _done(self._conv(name, twice))


def silu(x: mx.array) -> mx.array:
    """x times its sigmoid."""
    return x * mx.sigmoid(x)


def _done(x: mx.array) -> mx.array:
    """Evaluated here, so that what led to it can be freed."""
    mx.eval(x)
    return x
