"""A vision-language model of random weights, as transformers loads it from a folder."""

import gc
from pathlib import Path


def write_model(folder: Path) -> None:
    """A LLaVA of random weights and a vocabulary of 64 words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    gc.freeze()  # else each stage that ends collects among all that transformers has imported
    words = ["<unk>", "<pad>", "<image>", *(f"word{n}" for n in range(61))]
    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", pad_token="<pad>", extra_special_tokens=["<image>"]
    )
    text = "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}{% endif %}"
    template = "{% for part in messages[0]['content'] %}" + text + "{% endfor %}"
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", chat_template=template,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=28, patch_size=14, projection_dim=16, **small),
        text_config=LlamaConfig(vocab_size=64, max_position_embeddings=512, pad_token_id=1, **small),
        image_token_index=2,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.5)
    model.save_pretrained(folder)
