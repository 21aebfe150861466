"""The sentence encoder against transformers, on the released weights."""

import numpy as np
import torch

from stages.models.text.minilm import TOKENS, MiniLM
from stages.text_to_image.scores.features import TEXTS

SENTENCES = ("a red fox on a blue background", "Ein Übergrößen-Café, 猫!", "a", "word " * (TOKENS + 50))


def test_a_sentence_embedding_is_that_of_transformers_and_of_length_1():
    from transformers import AutoModel, AutoTokenizer

    folder = TEXTS.path().parent
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for sentence, found_E in zip(SENTENCES, MiniLM(folder).encode(SENTENCES), strict=True):
        tokens = tokenizer(sentence, return_tensors="pt", truncation=True, max_length=TOKENS)
        with torch.no_grad():
            mean_E = model(**tokens).last_hidden_state[0].mean(dim=0)
        assert np.abs(found_E - (mean_E / mean_E.norm()).numpy()).max() < 1e-4
        assert abs(np.linalg.norm(found_E) - 1) < 1e-5


def test_near_meanings_are_nearer_than_far_ones():
    dog, puppy, truck = MiniLM(TEXTS.path().parent).encode(["a dog", "a puppy", "a fire truck"])
    assert dog @ puppy > 2 * (dog @ truck)
