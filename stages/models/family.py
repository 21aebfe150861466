"""The record of a model family: data and the functions of its architecture. Stages and commands ask it, not the family's name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from stages.settings import nearest

if TYPE_CHECKING:
    import mlx.core as mx

    from stages.memory import Memory

Adapter = tuple[dict[str, "mx.array"], dict[str, float]]  # arrays by "<linear><ending>", float32; the scale of each Linear

F = TypeVar("F", bound="ModelFamily")

TOKENIZER = "tokenizer"  # the component without weights
# Component -> its folder in the diffusers layout, and the patterns of its files there.
FOLDERS = {"transformer": "transformer", "autoencoder": "vae", "text_encoder": "text_encoder", TOKENIZER: "tokenizer"}
FILES: Mapping[str, tuple[str, ...]] = dict.fromkeys(FOLDERS, ("*",))
# Where the tokenizer lies in the folder of the text encoder, whose gigabytes are no part of it.
TOKENIZER_FILES = ("tokenizer*.json", "vocab.json", "merges.txt", "chat_template*", "*_tokens*.json")
BESIDE: Mapping[str, Any] = {
    "folders": {**FOLDERS, TOKENIZER: FOLDERS["text_encoder"]},
    "files": {**FILES, TOKENIZER: TOKENIZER_FILES},
}


# Licence that is not free -> what it asks, in one line. None was read here: the second is as mflux and flux3-mlx sum it up.
TERMS: Mapping[str, str] = {
    "FLUX non-commercial": "not for commercial use",
    "FLUX Kommunity v1.0": (
        "not for commercial use, but pictures may be used commercially by those who earn less than 5 million US$ a year; "
        "with duties to filter what is drawn and to say that it is made by AI"
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    # Component -> names of files that must exist, for weights that are part of the checkout.
    required: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    # Component, such as "tokenizer" -> its folder below that of the weights; "" is that folder itself.
    folders: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # component -> patterns of its files

    name: str  # in project.toml
    title: str  # shown to the user
    licence: str
    code: str  # "module:attribute" of the architecture, which is imported when it is first used

    # Where the weights come from if a project names none: the hub, the checkout, or a seed.
    hub: str = ""  # hub id "org/name" of the weights
    gated: bool = False  # the hub asks users to accept a licence first
    bundled: str = ""  # folder of the weights, relative to the checkout
    seeded: int | None = None  # seed of random weights that the project generates
    single_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # component -> file names in use for one file
    hub_bytes: Mapping[str, int] = field(default_factory=dict)  # component -> bytes on the hub, about, if more than is read
    unsupported: Mapping[str, str] = field(default_factory=dict)  # component -> in one line, why it cannot be used yet

    begin: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # section -> settings of a new project.toml
    base: str = ""  # of a distilled family, which draws in few steps: the family to train on
    # Pattern of a name that some give -> what they mean, if it is another model; this family is then the nearest.
    meant: Mapping[str, str] = field(default_factory=dict)

    def require_trainable(self) -> None:
        """Raise ValueError if the family is distilled."""
        if self.base:
            raise ValueError(
                f"{self.name} is distilled: it draws in few steps, and training on it may fail. "
                f'Train on its base, family = "{self.base}"; the LoRA can be used on {self.name}. Or lay an assistant beneath, a '
                f"[[train.beneath]] with drawn = false; or set train.allow_distilled = true"
            )

    @property
    def architecture(self) -> Any:
        """An object with at least `write_random_weights(folder, family, seed)`. The first access imports MLX."""
        module, _, attribute = self.code.partition(":")
        return getattr(import_module(module), attribute)

    def require(self, component: str) -> None:
        """Raise ValueError with the reason if `component` cannot be used yet."""
        if reason := self.unsupported.get(component):
            raise ValueError(reason)

    def patterns(self, component: str) -> list[str]:
        folder = self.folders[component]
        return [f"{folder}/{pattern}" if folder else pattern for pattern in self.files[component]]

    def component_bytes(self) -> dict[str, int]:
        """Bytes by component, from the shapes of the weights. A family that knows none returns {}."""
        return {}

    @property
    def terms(self) -> str:
        """A line about a licence that is not free, else ""."""
        asked = TERMS.get(self.licence, "")
        return asked and f"{self.title} has the licence {self.licence}: {asked}. Read it at https://huggingface.co/{self.hub}"

    @property
    def source(self) -> str:
        """Where the weights come from if a project names none, for messages."""
        own = "a folder of yours" if self.seeded is None else "made by the project"
        return self.hub or (f"{self.bundled}, part of the checkout" if self.bundled else own)


def choose(families: Mapping[str, F], name: str) -> F:
    """Raises ValueError, with the nearest family that can be trained, and with what the name means elsewhere."""
    if name in families:
        return families[name]
    trained = {key: each for key, each in families.items() if not each.base}
    known = [(each, what) for each in trained.values() for how, what in each.meant.items() if re.search(how, name.lower())]
    what = f": {known[0][1]}" if known and known[0][1] else ""
    near = f"{what}; did you mean {known[0][0].name}?" if known else nearest(name.lower(), trained, cutoff=0.4)
    raise ValueError(f"family must be one of {', '.join(families)}, got {name!r}{near}")


def twin(families: Mapping[str, F], family: ModelFamily) -> F | None:
    """The family distilled from `family`, which draws in few steps with adapters trained on that."""
    return next((each for each in families.values() if each.base == family.name), None)


@dataclass(frozen=True, kw_only=True)
class Family(ModelFamily):
    """A family of image models, as plain data that can be pickled."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(FOLDERS, ("config.json",)),
        TOKENIZER: ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }

    folders: Mapping[str, str] = field(default_factory=lambda: FOLDERS)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FILES)

    # Sizes, with the keys of the released config.json; one beside the weights takes precedence.
    transformer: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    autoencoder: Mapping[str, Any]

    # Text embeddings.
    text_kind: str = "qwen3"  # architecture and prompt form of the text encoder
    text_layers: tuple[int, ...] = (9, 18, 27)  # hidden states that are concatenated; k is that after k layers
    text_tokens: int = 512  # rows of an embedding, padding included; if texts differ in rows, the most that are read
    # Where a short prompt is padded. "repeated": one row at the end, if `Architecture.text_rows` asks for more rows than the text
    # has; the transformer repeats it.
    text_padding: Literal["end", "start", "none", "repeated"] = "end"
    first_row: tuple[float, ...] = ()  # root mean square of each hidden state of the first token; empty if nobody measured it
    start_loss: tuple[float, float] = (0.0, 1.0)  # loss before training, divided by that of a model that knows nothing

    # How the transformer reads reference images: not at all, as further tokens of the image, or with blocks of their own.
    references: Literal["none", "shared", "own"] = "shared"

    # Guidance and drawing.
    guidance_embedded: bool = False  # the transformer reads the guidance value as an input
    real_cfg: bool = True  # classifier-free guidance: two passes, with the prompt and with the empty prompt
    guidance: float = 4.0  # default when drawing
    sampling_steps: int = 50  # default number of denoising steps

    def require_references(self) -> None:
        """Raise ValueError if the transformer reads no reference images."""
        if self.references == "none":
            raise ValueError(f"{self.name} reads no reference images: take them away, or choose another family")

    def without_references(self) -> Family:
        """The record for work that has no reference images: blocks that only these need are left out."""
        return replace(self, references="none") if self.references == "own" else self

    def component_bytes(self) -> dict[str, int]:
        """Bytes by component: 4 per value of the autoencoder, else 2, or `hub_bytes`. A text encoder that cannot be used is left
        out.
        """
        architecture = self.architecture
        sizes = {"transformer": 2 * sum(map(math.prod, architecture.transformer_config(None, self).shapes().values()))}
        sizes["autoencoder"] = architecture.autoencoder_memory(None, self, 256, 256, 4, True).held
        if "text_encoder" not in self.unsupported:
            encoder: Any = architecture.text_encoder_sizes(None, self)
            sizes["text_encoder"] = 2 * sum(map(math.prod, encoder.shapes(encoder.num_hidden_layers).values()))
        return sizes | dict(self.hub_bytes)

    @property
    def architecture(self) -> Architecture:
        found: Architecture = super().architecture
        return found


@dataclass(frozen=True)
class Architecture:
    """The functions of one architecture. `path` is a component's folder or file, as `folders.locate` finds it.

    What reads weights raises ValueError, in one line, if they are missing, cut short or of another model.
    B batch, L image tokens, T text rows, C latent channels, J text features, h and w latent height and width.
    """

    # Sizes.
    pixels_per_token: int  # pixels along one side of an image token; heights and widths of images are multiples of it
    transformer_class: str  # the transformer's class in diffusers, for config.json
    tag: str  # of its adapters on the hub
    readers: tuple[str, ...]  # programs beside diffusers and ComfyUI that read its adapters: mflux, Draw Things

    # transformer_config(path or None, family): the sizes, from the config.json at path, else from the family's record.
    transformer_config: Callable[[Path | None, Family], TransformerConfig]
    # load_transformer(path, family, dtype=None, arrange=None): read the weights, cast each to dtype (None: as stored), then
    # replace it by arrange(name, weight), which may pack it, or write it elsewhere and return an empty array. One weight is
    # held in full at a time.
    load_transformer: Callable[..., Transformer]
    # build_transformer(config, weights): a transformer of these weights, by the names of config.shapes(), arrays or packed.
    build_transformer: Callable[[Any, Mapping[str, Any]], Transformer]
    # in_block(name): whether a weight belongs to a block, by its full name.
    in_block: Callable[[str], bool]
    # packs_outside(name): whether a weight outside the blocks is large enough to be worth packing.
    packs_outside: Callable[[str], bool]
    outside_bits: int  # the fewest bits per weight that are safe outside the blocks

    # tokens(x_BCHW) -> x_BLC: latents, or noise of their shape, as the sequence that the transformer reads and predicts.
    tokens: Callable[[mx.array], mx.array]
    # text_rows(tokens): the rows that the transformer reads for an embedding of so many rows. Texts that agree in it can share a
    # batch; if their embeddings differ in rows, `inputs` gets them levelled, and tokens_B.
    text_rows: Callable[[int], int]
    # inputs(x_BLC, (h, w), text_BTJ, sigma_B, guidance=None, references=(), tokens_B=None, target_B=None): the keyword arguments
    # of `enter`.
    # x_BLC are noisy latents, sigma_B the noise level of each sample, 0 (clean) to 1; guidance a number that only models with
    # embedded guidance read; references the clean latents (B,C,h,w) of each reference image; tokens_B, given only if they
    # differ, the rows of each text, whose last one is repeated in text_BTJ to level the batch; target_B the noise level that a
    # step of drawing goes to, which a flow map reads.
    inputs: Callable[..., dict[str, Any]]

    # load_autoencoder(path, family, dtype=None).
    load_autoencoder: Callable[..., Autoencoder]
    # load_text_encoder(weights path, tokenizer path, family, precision, arrange=None, by_layer=False): precision is "bfloat16" or
    # "float32". arrange(name, weight) may pack the weight of a layer. by_layer reads the layers again for every batch of texts.
    load_text_encoder: Callable[..., TextEncoder]
    # text_encoder_sizes(path or None, family): what an estimate of its memory needs.
    text_encoder_sizes: Callable[[Path | None, Family], TextEncoderSizes]
    # autoencoder_memory(path or None, family, height, width, itemsize, encodes, exact=None): to encode or decode one image of
    # this size in pixels, with or without exact float32 products (None: as they are now).
    autoencoder_memory: Callable[..., Memory]

    # sigmas(tokens, steps): the steps + 1 noise levels, from 1 down to 0, to draw an image of so many image tokens.
    sigmas: Callable[[int, int], list[float]]

    guided_together: int  # up to so many image tokens, both passes of guidance run as one batch

    # read_adapter(path): an adapter file of any known format, with the names of `Transformer.linears`.
    read_adapter: Callable[[Path], Adapter]
    # name of a format -> function(arrays, scales): an adapter as arrays in the names of that format, scales folded in.
    adapter_styles: Mapping[str, Callable[[dict[str, mx.array], dict[str, float]], dict[str, mx.array]]]

    # write_random_weights(folder, family, seed): write a complete model of the family's sizes, in the diffusers layout.
    write_random_weights: Callable[[Path, Family, int], None]
    # is_transformer(shapes, family) and so on: whether weights with these names, without prefix, and shapes are the family's.
    # Numbers of columns do not count: quantised weights have fewer.
    is_transformer: Callable[[Mapping[str, Shape], Family], bool]
    is_autoencoder: Callable[[Mapping[str, Shape], Family], bool]
    is_text_encoder: Callable[[Mapping[str, Shape], Family], bool]

    modular: bool = False  # diffusers draws with a ModularPipeline, whose components are loaded in a step of their own

    def draw(self, model: Transformer, text_1TJ: mx.array, height: int, width: int, **settings: Any) -> Iterator[mx.array]:
        """Yield the latent (1, C, h, w), float32, after every denoising step; the last one is the image's.

        Settings: seed, steps, guidance, and as needed: negative_1TJ, the embedding of the empty prompt, makes guidance
        classifier-free, two passes a step; predict(**inputs) replaces model(**inputs), to draw with an adapter; references
        are the clean latents (1, C, h, w) of reference images. height and width are pixels.
        """
        from stages.models import sampling

        return sampling.draw(self.inputs, self.sigmas, model, text_1TJ, height, width, **settings)

    def zero_inputs(
        self, config: Any, samples: int, size: tuple[int, int], text_rows: int, references: Sequence[tuple[int, int]] = ()
    ) -> dict[str, Any]:
        """`inputs` of zeros, lazy, to estimate memory with a meta model. Sizes are (h, w), of the image and of references."""
        import mlx.core as mx

        x_BLC = mx.zeros((samples, math.prod(size), config.latent_channels))
        text_BTJ = mx.zeros((samples, text_rows, config.text_features))
        beside = [mx.zeros((samples, config.latent_channels, *each)) for each in references]
        return self.inputs(x_BLC, size, text_BTJ, mx.zeros((samples,)), 0.0, beside)

    def meta_transformer(self, config: Any, dtype: mx.Dtype) -> Transformer:
        """Of arrays that are never computed and take no memory, for names, shapes and estimates."""
        from stages.models.layers import RotaryShapes

        made = self.build_transformer(config, _meta_weights(config, dtype))
        made.rope = RotaryShapes(config.axes)
        return made


@dataclass(frozen=True)
class Reading:
    """How a retriever reads texts: ids of tokens. The default is T5's."""

    end: bool = True  # each text ends with the end token that tokenizer_config.json names
    special: bool = True  # the tokenizer adds its special tokens; else unknown ones are left out, too
    query: int | None = None  # comes after the first token of a query, within its length
    document: int | None = None
    expansion: int | None = None  # with this, queries are filled up to their length
    attended: bool = True  # other tokens read those of the expansion
    skipped: frozenset[int] = frozenset()  # tokens of documents that have no vector
    query_tokens: int | None = None  # lengths that the model was made for
    document_tokens: int | None = None


RETRIEVER_FILES: Mapping[str, tuple[str, ...]] = {
    "encoder": ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "[12]_Dense/*"),
    TOKENIZER: ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model"),
}


@dataclass(frozen=True, kw_only=True)
class RetrieverFamily(ModelFamily):
    """Weights lie in one folder, in the layout of transformers, with the projection head in 1_Dense or 2_Dense."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("config.json", "1_Dense/config.json", "1_Dense/model.safetensors"),
        TOKENIZER: ("tokenizer.json", "tokenizer_config.json"),
    }

    # All files beside each other, as transformers writes them.
    folders: Mapping[str, str] = field(default_factory=lambda: {"encoder": "", TOKENIZER: ""})
    files: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: RETRIEVER_FILES)

    sizes: Mapping[str, Any] = field(default_factory=dict)  # content of config.json, for random weights and forecasts of memory
    trained: bool = True  # adapters can be trained
    lower_case: bool = False  # texts, before they are tokenised
    head_seed: int | None = None  # draws a head for weights without one, to be trained before use; None: that is an error

    def require_trained(self) -> None:
        if not self.trained:
            raise ValueError(f"{self.name} is searched with as it is: remove [train], or choose another family to tune")

    @property
    def architecture(self) -> RetrieverArchitecture:
        found: RetrieverArchitecture = super().architecture
        return found


Shape = tuple[int, ...]


@dataclass(frozen=True)
class RetrieverArchitecture:
    """In `family.architecture`. `path`: the weights' folder; reading raises ValueError in one line. `sizes`: a T5Config, say."""

    # sizes(path): the sizes of the encoder and its head.
    sizes: Callable[[Path], Any]
    # load_encoder(path, dtype, head_seed): the encoder with its head; a missing head is drawn from the seed, if there is one.
    load_encoder: Callable[..., Any]
    # load_weights(path, sizes, dtype, head_seed): its weights by name.
    load_weights: Callable[..., dict[str, mx.array]]
    # build_encoder(sizes, weights): an encoder of these weights, by the names of sizes.shapes(), arrays or packed.
    build_encoder: Callable[[Any, Mapping[str, Any]], Any]
    # write_model(folder, sizes, weights, settings): a folder that transformers and sentence-transformers load.
    write_model: Callable[..., None]
    # write_random_weights(folder, family, seed): a complete model of the family's sizes.
    write_random_weights: Callable[[Path, Any, int], None]
    # is_model(folder): whether it holds a model of this architecture, by its small files.
    is_model: Callable[[Path], bool]
    # reading(folder): how its texts are read.
    reading: Callable[[Path], Reading] = lambda folder: Reading()

    def meta_encoder(self, sizes: Any, dtype: mx.Dtype) -> Any:
        """Of arrays that are never computed and take no memory, for names, shapes and estimates."""
        return self.build_encoder(sizes, _meta_weights(sizes, dtype))


def _meta_weights(config: Any, dtype: mx.Dtype) -> dict[str, mx.array]:
    import mlx.core as mx

    return {name: mx.zeros(shape, dtype) for name, shape in config.shapes().items()}


class TransformerConfig(Protocol):
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def attention_head_dim(self) -> int: ...
    @property
    def latent_channels(self) -> int:
        """C, of an image token."""

    @property
    def text_features(self) -> int:
        """J, of a text row."""

    def shapes(self) -> dict[str, Shape]: ...


# (name within the block, weight, x) -> y: computes one Linear of a block. An adapter replaces it.
Linear = Callable[[str, Any, "mx.array"], "mx.array"]


@dataclass(frozen=True)
class Block:
    kind: str  # such as double or single
    name: str  # transformer_blocks.0
    weights: dict[str, Any]  # by name within the block: attn.to_q.weight


class Transformer(Protocol):
    """A transformer that is computed block by block.

        h, shared = model.enter(**inputs)
        for b in model.blocks:
            h = model.block(b.kind)(b.weights, h, shared, linear)
        velocity = model.leave(h, shared)

    `model(**inputs, linear_for=f)` does all of it, with `linear = f(b.name)`. `inputs` is what `Architecture.inputs` returns.
    """

    @property
    def config(self) -> Any:
        """The sizes, with the attributes of `TransformerConfig`."""

    rope: Callable[[Any], list[mx.array]]  # tables of rotary positions, by ids

    @property
    def dtype(self) -> mx.Dtype: ...
    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def enter(self) -> Callable[..., tuple[Any, Any]]:
        """enter(**inputs) -> (input of the first block, what all blocks read)."""

    @property
    def leave(self) -> Callable[..., mx.array]:
        """leave(h, shared) -> velocity of the image tokens, (B, L, C)."""

    def block(self, kind: str) -> Callable[..., Any]:
        """function(weights, h, shared, linear) -> output of a block of this kind, which depends on the arguments alone."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of every Linear in the blocks, by full name. An adapter can change these."""


class Autoencoder(Protocol):
    def encode(self, images_BHWC: mx.array) -> mx.array:
        """(B, H, W, 3) from -1 to 1 -> float32 (B, C, H / 16, W / 16)."""

    def decode(self, latents_BChw: mx.array) -> mx.array:
        """(B, C, h, w) -> float32 (B, 16 h, 16 w, 3), about -1 to 1, not clipped."""


class TextEncoderSizes(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    def shapes(self, layers: int) -> dict[str, Shape]:
        """Shapes of what the first `layers` layers need, embedding included; in layers, names start with "layers."."""


class TextEncoder(Protocol):
    def encode(self, texts: list[str]) -> Iterator[Any]:
        """One `stages.models.text.encoder.Embedding` per text, in order."""
