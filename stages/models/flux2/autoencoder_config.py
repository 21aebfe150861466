"""The sizes of FLUX.2's autoencoder, and the names and shapes of all its weights in the diffusers layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from stages.models.sizes import checked_sizes

Shapes = Iterator[tuple[str, tuple[int, ...]]]

FIXED = {"act_fn": "silu", "patch_size": (2, 2)}  # the only supported values of these fields


@dataclass(frozen=True)
class AutoencoderConfig:
    """Fields have the names and meanings of the keys in vae/config.json."""

    in_channels: int
    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    norm_num_groups: int
    decoder_block_out_channels: tuple[int, ...] | None = None  # None: those of the encoder
    batch_norm_eps: float = 1e-4
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> AutoencoderConfig:
        """Raises ValueError for a missing key or unsupported value. Keys without influence on the computation are ignored."""
        for key, value in FIXED.items():
            other = content.get(key, value)
            if (tuple(other) if isinstance(other, list) else other) != value:
                raise ValueError(f"autoencoder config: {key} = {other!r} is not supported; expected {value!r}")
        known = checked_sizes(cls, content, "autoencoder config")
        missing = [f.name for f in fields(cls) if f.name not in known and f.default is MISSING]
        if missing:
            raise ValueError(f"autoencoder config lacks {', '.join(missing)}")
        made = cls(**known)
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
        return shapes | {"bn.running_mean": (4 * latent,), "bn.running_var": (4 * latent,)}


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
