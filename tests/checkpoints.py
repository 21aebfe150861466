"""Checkpoints in the layout of the released models, small and of random weights, written by diffusers and transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.text_to_image.families import FLUX2, FLUX3, Z_IMAGE

# Special tokens of Mistral's tokenizer with their ids; the others of the first 20 are reserved.
SPECIAL = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 10: "[IMG]", 11: "<pad>"}
SPECIAL |= {17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% set said %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endset %}"
    "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ said }}[/SYSTEM_PROMPT]{% else %}[INST]{{ said }}[/INST]{% endif %}{% endfor %}"
)
HIDDEN = 32


def mistral_tokenizer() -> Any:
    """With a token for each byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [SPECIAL.get(i, f"<SPECIAL_{i}>") for i in range(20)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*names, *letters])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", chat_template=TEMPLATE, **tokens)


def mistral_encoder() -> Any:
    """40 layers and a vision tower, all small."""
    import torch
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {
        "model_type": "mistral",
        "vocab_size": 320,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        "sliding_window": None,
        "initializer_range": 0.15,
        "pad_token_id": 11,
    }
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)).eval()
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.data = 1 + 0.3 * torch.randn_like(tensor)
    return model


def random_model(kind: Any, **sizes: Any) -> Any:
    """A model of a class of diffusers with small random numbers, also where a fresh one has zeros, and norms near 1."""
    import torch

    torch.manual_seed(0)
    model = kind(**sizes)
    for name, tensor in model.named_parameters():
        about = 1.0 if "norm" in name and tensor.ndim == 1 else 0.0
        tensor.data = about + (0.3 if about else 0.05) * torch.randn_like(tensor)
    return model.eval()


def with_lora(model: Any, names: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return (PEFT's model with a random LoRA of rank 2 and scale 2, the LoRA's tensors by our names)."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=names, init_lora_weights=False))
    tensors = {
        name.removeprefix("base_model.model.").replace(".default", ""): tensor
        for name, tensor in adapted.named_parameters()
        if "lora_" in name
    }
    return adapted, tensors


def save_lora(pipeline: Any, folder: Path, model: Any, config: Any) -> Path:
    """The file in which `pipeline`, a class of diffusers, saves an adapter that was added to `model` with `config`."""
    from peft.utils import get_peft_model_state_dict

    about = config.to_dict() | {"target_modules": list(config.target_modules)}
    pipeline.save_lora_weights(folder, get_peft_model_state_dict(model), transformer_lora_adapter_metadata=about)
    return folder / "pytorch_lora_weights.safetensors"


def weights_of(model: Any) -> dict[str, Any]:
    """Every weight of a transformer of ours, as it is kept."""
    return model.top | {f"{block.name}.{name}": value for block in model.blocks for name, value in block.weights.items()}


def dev_pipeline() -> Any:
    import torch
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel

    from stages.models.flux2.random_weights import SCHEDULER
    from stages.text_to_image.families import TINY_AUTOENCODER, TINY_TRANSFORMER

    torch.manual_seed(1)
    sizes = {**TINY_TRANSFORMER, "joint_attention_dim": 3 * HIDDEN, "guidance_embeds": True}
    autoencoder = AutoencoderKLFlux2(
        **TINY_AUTOENCODER, down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4
    )
    autoencoder.bn.running_mean.normal_(0, 0.1)
    autoencoder.bn.running_var.uniform_(0.5, 1.5)
    return Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**{k: v for k, v in SCHEDULER.items() if k != "_class_name"}),
        vae=autoencoder.eval(),
        text_encoder=mistral_encoder(),
        tokenizer=mistral_tokenizer(),
        transformer=Flux2Transformer2DModel(**sizes).eval(),
    )


def as_single_file(arrays: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """diffusers' names -> those of Black Forest Labs' single files, after `prefix`."""
    from stages.models.flux2 import load

    plain = {new: old for old, new in load.TRANSFORMER.items()}
    blocks = {
        "transformer_blocks": ("double_blocks", load.DOUBLE),
        "single_transformer_blocks": ("single_blocks", load.SINGLE),
    }
    found: dict[str, Any] = {}
    for key, value in arrays.items():
        name = key.removesuffix(".weight")
        kind, _, rest = name.partition(".")
        if kind not in blocks:
            half = len(value) // 2
            swapped = stacked([value[half:], value[:half]]) if name == "norm_out.linear" else value
            found[f"{plain.get(name, 'final_layer.adaLN_modulation.1')}.weight"] = swapped
            continue
        number, _, inner = rest.partition(".")
        at, names = blocks[kind][0] + f".{number}.", {new: old for old, new in blocks[kind][1].items()}
        if fused := next((old for old, parts in load.FUSED.items() if inner in parts), ""):
            parts = [arrays[f"{kind}.{number}.{part}.weight"] for part in load.FUSED[fused]]
            found[f"{at}{fused}.weight"] = stacked(parts)
        else:
            found[at + names[inner] + (".scale" if "norm" in inner else ".weight")] = value
    return {prefix + key: value for key, value in found.items()}


def flux3_as_single_file(arrays: dict[str, Any]) -> dict[str, Any]:
    """The inverse of diffusers' own conversion."""
    inside = {"attn.to_q": "q_proj", "attn.to_k": "k_proj", "attn.to_v": "v_proj", "attn.to_out.0": "attn_out"}
    inside |= {"ff.linear_in": "mlp_in", "ff.linear_out": "mlp_out", "target_timestep_embedder.linear_": "ref_time_in."}
    inside |= {"timestep_embedder.linear_": "time_in.", "time_in.1": "time_in.in_layer", "time_in.2": "time_in.out_layer"}
    inside |= {"attn.norm_q.weight": "norm.query_norm.scale", "attn.norm_k.weight": "norm.key_norm.scale"}
    inside |= {"x_embedders.": "emb_in.", "context_embedder.": "txt_in.", "proj_out.": "final_layer.image.linear."}
    inside |= {"single_transformer_blocks.": "single_blocks.", "norm_out.linear": "final_layer.image.adaLN_modulation.1"}
    found: dict[str, Any] = {"repa_projectors.0.weight": np.ones((2, 2), np.float32)}
    for name, value in arrays.items():
        key = f"content_{name}" if name.startswith("mode_blocks.") else name
        for ours, makers in inside.items():
            key = key.replace(ours, makers)
        key = key.replace(".linear.weight", ".lin.weight") if "stream_modulations" in key else key
        half = value.shape[0] // 2
        found[key] = stacked([value[half:], value[:half]]) if "adaLN" in key else value
    return found


def z_image_as_single_file(arrays: dict[str, Any], prefix: str = "model.diffusion_model.") -> dict[str, Any]:
    """As `flux3_as_single_file`, in ComfyUI's names."""
    found: dict[str, Any] = {"norm_final.weight": np.ones(64, np.float32)}
    for name, value in arrays.items():
        if name.endswith("to_q.weight"):
            parts = [arrays[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            found[name.replace("to_q", "qkv")] = stacked(parts)
        elif not name.endswith(("to_k.weight", "to_v.weight")):
            plain = name.replace("all_x_embedder.2-1", "x_embedder").replace("all_final_layer.2-1", "final_layer")
            plain = plain.replace("attention.to_out.0", "attention.out")
            found[plain.replace("attention.norm_q", "attention.q_norm").replace("attention.norm_k", "attention.k_norm")] = value
    return {prefix + name: value for name, value in found.items()}


def stacked(parts: list[Any]) -> Any:
    import torch

    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


def autoencoder_as_single_file(state: dict[str, Any]) -> dict[str, Any]:
    """In the names of ae.safetensors: the reverse of what the loader does, written down independently."""
    found = {}
    for key, value in state.items():
        if key == "bn.num_batches_tracked":
            continue
        key = re.sub(r"up_blocks\.(\d)", lambda m: f"up.{3 - int(m[1])}", key)
        key = re.sub(r"down_blocks\.(\d)", r"down.\1", key)
        key = re.sub(r"(up|down)\.(\d)\.resnets\.(\d)", r"\1.\2.block.\3", key)
        key = re.sub(r"(up|down)samplers\.0\.conv", r"\1sample.conv", key).replace("conv_shortcut", "nin_shortcut")
        key = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", key)
        key = key.replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm").replace("conv_norm_out", "norm_out")
        if "mid_block.attentions.0.to_" in key:
            key = key.replace("mid_block.attentions.0.to_", "mid.attn_1.").replace("attn_1.out.0", "attn_1.proj_out")
            value = value[:, :, None, None] if value.ndim == 2 else value
        key = re.sub("^quant_conv", "encoder.quant_conv", key)
        found[re.sub("^post_quant_conv", "decoder.post_quant_conv", key)] = value
    return found


SINGLE_FILES = {FLUX2: as_single_file, FLUX3: flux3_as_single_file, Z_IMAGE: z_image_as_single_file}  # by a record's `code`


def quantised(
    arrays: Mapping[str, mx.array],
    bits: int,
    group: int,
    rename: Callable[[str], str] = str,
    packs: Callable[[str], bool] = lambda key: True,
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return (arrays of a file with matrices as MLX quantises them, the values that they stand for)."""
    stored, values = {}, {}
    for key, value in arrays.items():
        name = rename(key)
        stored[name] = values[key] = value
        if value.ndim == 2 and value.shape[-1] % group == 0 and packs(key):
            parts = mx.quantize(value, group_size=group, bits=bits)
            stored |= dict(zip((name, name.replace("weight", "scales"), name.replace("weight", "biases")), parts, strict=True))
            values[key] = mx.dequantize(*parts, group_size=group, bits=bits)
    return stored, values


def mflux_name(key: str) -> str:
    """Of a weight of FLUX.2."""
    return key.replace("timestep_embedder.", "").replace("attn.to_out.0.", "attn.to_out.")


def in_fp8(arrays: dict[str, Any], dtype: Any, scales: str, ending: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tensors of a file with matrices in fp8, the values that they stand for). `scales` is "none", "tensor" or "row"."""
    import torch

    stored, values = {}, {}
    for key, value in arrays.items():
        if value.ndim < 2:
            stored[key] = values[key] = value
            continue
        top = {"none": None, "tensor": value.abs().max(), "row": value.abs().amax(1, keepdim=True)}[scales]
        scale = torch.tensor(1.0) if top is None else (top / torch.finfo(dtype).max).float()
        stored[key] = (value / scale).to(dtype)
        values[key] = stored[key].float() * scale
        if top is not None:
            stored[key.removesuffix("weight") + ending] = scale
            stored[key.removesuffix("weight") + ("scale_input" if ending == "scale_weight" else "input_scale")] = torch.tensor(
                0.5
            )
    if ending == "scale_weight":
        stored["scaled_fp8"] = torch.zeros(2).to(dtype)
    return stored, values
