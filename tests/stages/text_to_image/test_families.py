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
        ("black-forest-labs/FLUX.1-schnell", "klein-base-4b", ": FLUX.1 is an older model of another .*"),
        ("flux2-dev", "dev", ""),
        ("flux-3-klein", "flux3-klein-base", ""),
        ("black-forest-labs/flux-3-image-klein", "flux3-klein-base", ""),
    ],
)
def test_an_unknown_name_is_refused_with_the_smallest_free_base_or_the_one_that_is_nearest(given, meant, told):
    with pytest.raises(ValueError, match=rf"family must be one of .*, got '{given}'{told}; did you mean {meant}\?$"):
        family(given)


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_a_family_has_one_source_of_weights_sizes_that_fit_each_other_and_one_kind_of_guidance_and_can_be_pickled(record):
    assert sum((bool(record.hub), bool(record.bundled), record.seeded is not None)) == 1
    assert record.source and (not record.gated or record.hub)
    if record.bundled:
        assert all(any((ROOT / record.bundled / folder).glob("*.json")) for folder in FOLDERS.values())
        assert (ROOT / record.bundled / "README.md").is_file()
    config = record.architecture.transformer_config(None, record)
    assert config.latent_channels == 4 * record.autoencoder["latent_channels"]
    assert config.text_features == len(record.text_layers) * record.text_encoder["hidden_size"]
    assert max(record.text_layers) <= record.text_encoder["num_hidden_layers"]
    assert record.guidance_embedded == record.transformer.get("guidance_embeds", False)
    assert record.guidance_embedded + record.real_cfg <= 1
    assert record.real_cfg or record.guidance_embedded or record.guidance == 1.0
    assert pickle.loads(pickle.dumps(record)) == record
    # A partial equals itself alone; its text names the function with its place in memory, and all arguments.
    assert repr(pickle.loads(pickle.dumps(record.architecture))) == repr(record.architecture)


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


DISTILLED = [record for record in FAMILIES.values() if record.base]


@pytest.mark.parametrize("record", DISTILLED, ids=lambda f: f.name)
def test_an_adapter_of_a_base_fits_its_distilled_twin_which_draws_with_fewer_passes_from_the_same_texts_and_latents(record):
    base = FAMILIES[record.base]
    assert twin(FAMILIES, base) is record and not base.base
    assert meta_transformer(None, base).linears() == meta_transformer(None, record).linears()
    for name in ("text_encoder", "text_layers", "text_tokens", "autoencoder"):
        assert getattr(record, name) == getattr(base, name), name
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
