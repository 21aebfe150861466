import math
import pickle
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from stages.models.family import FOLDERS, twin
from stages.text_to_image.families import FAMILIES, family
from stages.text_to_image.sampler import passes
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.weights import meta_transformer

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("given", "meant", "told"),
    [
        ("klein-bse-4b", "klein-base-4b", ""),
        ("klein", "klein-base-4b", ""),
        ("flux2-klein", "klein-base-4b", ""),
        ("klein-9", "klein-base-9b", ""),
        ("flux1-dev", "klein-base-4b", ": FLUX.1 is an older model of another architecture, not known here"),
        (
            "black-forest-labs/FLUX.1-schnell",
            "klein-base-4b",
            ": FLUX.1 is an older model of another architecture, not known here",
        ),
        ("flux2-dev", "dev", ""),
        ("flux-3-klein", "flux3-klein-base", ""),
        ("black-forest-labs/flux-3-image-klein", "flux3-klein-base", ""),
    ],
)
def test_an_unknown_name_is_refused_with_the_smallest_free_base_or_the_one_that_is_nearest(given, meant, told):
    with pytest.raises(ValueError, match=rf"family must be one of .*, got '{given}'{told}; did you mean {meant}\?$"):
        family(given)


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_a_familys_weights_are_published_or_bundled_or_generated_from_a_seed(record):
    assert sum((bool(record.hub), bool(record.bundled), record.seeded is not None)) == 1
    assert record.source
    assert not record.gated or record.hub


@pytest.mark.parametrize("record", [f for f in FAMILIES.values() if f.bundled], ids=lambda f: f.name)
def test_a_bundled_family_lies_in_the_checkout_with_all_its_components_and_a_model_card(record):
    for folder in FOLDERS.values():
        assert any((ROOT / record.bundled / folder).glob("*.json")), folder
    assert (ROOT / record.bundled / "README.md").is_file()


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_the_sizes_of_a_family_fit_each_other(record):
    config = record.architecture.transformer_config(None, record)
    assert config.latent_channels == 4 * record.autoencoder["latent_channels"]
    assert config.text_features == len(record.text_layers) * record.text_encoder["hidden_size"]
    assert max(record.text_layers) <= record.text_encoder["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("klein-4b", 169, 3_875_544_576),
        ("klein-9b", 233, 9_078_581_248),
        ("dev", 331, 32_223_281_152),
        ("flux3-klein-base", 357, 5_538_458_368),
        ("flux3-klein", 359, 5_548_681_984),
        ("z-image", 521, 6_154_908_736),
    ],
)
def test_the_released_sizes_give_the_released_numbers_of_parameters(name, tensors, parameters):
    def counts(record):
        shapes = record.architecture.transformer_config(None, record).shapes().values()
        return len(shapes), sum(map(math.prod, shapes))

    record = family(name)
    assert counts(record) == (tensors, parameters)
    if name.startswith("flux3"):
        assert parameters - counts(record.without_references())[1] == 670_434_560


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_guidance_enters_one_way_only(record):
    assert not (record.guidance_embedded and record.real_cfg)
    assert record.guidance_embedded == record.transformer.get("guidance_embeds", False)
    assert record.real_cfg or record.guidance_embedded or record.guidance == 1.0


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_a_family_can_be_pickled_and_so_can_its_architecture(record):
    assert pickle.loads(pickle.dumps(record)) == record
    # A partial equals itself alone; its text names the function with its place in memory, and all arguments.
    assert repr(pickle.loads(pickle.dumps(record.architecture))) == repr(record.architecture)


DISTILLED = [record for record in FAMILIES.values() if record.base]


@pytest.mark.parametrize("record", DISTILLED, ids=lambda f: f.name)
def test_an_adapter_of_a_base_fits_its_distilled_twin_which_draws_with_fewer_passes_from_the_same_texts_and_latents(record):
    base = FAMILIES[record.base]
    assert twin(FAMILIES, base) is record and not base.base
    assert meta_transformer(None, base).linears() == meta_transformer(None, record).linears()
    assert (record.text_encoder, record.text_layers, record.text_tokens) == (
        base.text_encoder,
        base.text_layers,
        base.text_tokens,
    )
    assert record.autoencoder == base.autoencoder
    assert record.sampling_steps * passes(SamplesConfig(), record) < base.sampling_steps * passes(SamplesConfig(), base)


def test_the_table_of_families_is_listed_without_importing_mlx():
    code = "import sys; from stages.text_to_image.families import FAMILIES; assert FAMILIES; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_the_inputs_of_every_family_run_through_its_chain_of_blocks(record):
    architecture = record.architecture
    config = architecture.transformer_config(None, record)
    model = architecture.meta_transformer(config, mx.bfloat16)
    h, shared = model.enter(**architecture.zero_inputs(config, 2, (4, 6), record.text_tokens))
    for block in model.blocks:
        h = model.block(block.kind)(block.weights, h, shared)
    # The rows of each stream may be padded.
    assert h.shape[0] == 2 and h.shape[1] >= record.text_tokens + 24
    assert model.leave(h, shared).shape == (2, 24, config.latent_channels)
