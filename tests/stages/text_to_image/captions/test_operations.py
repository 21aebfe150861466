"""Operations on captions: replaced words, dropped parts, shuffled comma lists."""

from stages.text_to_image.caption_files import Caption
from stages.text_to_image.captions.stage import CaptionsConfig, operate

TAGS = "ohwx cat, sitting, Watermark, on grass, blue sky, watermark"


def texts(text: str, image_id: str = "image", **config: object) -> list[str]:
    return [each.text for each in operate([Caption(text, "sidecar", "a.txt")], CaptionsConfig(**config), image_id)]


def test_words_are_replaced_in_the_order_of_the_setting_then_parts_are_dropped():
    assert texts(" a cat , and  a dog") == [" a cat , and  a dog"], "without settings"
    assert texts(TAGS, replace={"ohwx": "sks", "sks cat": "sks"}, drop=("watermark",)) == ["sks, sitting, on grass, blue sky"]


def test_shuffled_captions_keep_their_head_and_their_parts_and_differ_between_images():
    found = texts(TAGS, drop=("watermark",), shuffle=20, keep=1)
    assert len(found) == 20 and len(set(found)) == 6, "all orders of three parts"
    assert all(each.startswith("ohwx cat, ") and sorted(each.split(", ")) == sorted(found[0].split(", ")) for each in found)
    assert found == texts(TAGS, drop=("watermark",), shuffle=20, keep=1)
    assert found[:6] == texts(TAGS, drop=("watermark",), shuffle=6, keep=1), "more orders change none of those before"
    assert found != texts(TAGS, "another image", drop=("watermark",), shuffle=20, keep=1)


def test_captions_have_the_weights_of_their_positions_and_their_orders_share_them():
    captions = [Caption(text, "sidecar", "a.txt") for text in ("a, b, c", "d", "e")]
    assert [each.weight for each in operate(captions, CaptionsConfig(), "image")] == [None] * 3
    assert [each.weight for each in operate(captions, CaptionsConfig(weights=(3.0, 1.0)), "image")] == [3.0, 1.0, 1.0]
    shuffled = operate(captions, CaptionsConfig(weights=(3.0, 1.0), shuffle=2), "image")
    assert [each.weight for each in shuffled] == [1.5, 1.5, 0.5, 0.5, 0.5, 0.5]
