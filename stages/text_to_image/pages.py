"""The pages of text_to_image: images, captions, training, samples and scores, as blocks of SQL (`stages.page`)."""

from __future__ import annotations

from stages.page import Cards, Chart, Detail, Editor, Listing, Page, Sheet

FIRST_CAPTION = "select image_id, arg_min(text, position) as text from captions where role = 'caption' group by image_id"
DRAWN = "select image_id, count(*) as draws, avg(loss) as loss from train where split = 'train' group by image_id"
CROPPED = (
    "select image_id, max(scale) as scale, max(crop_loss) as crop_loss from buckets where rejected is null group by image_id"
)

IMAGES = Page(
    "images",
    "Images",
    (
        Cards(
            "Images",
            f"""
select 'image_folder/' || images.path as picture, images.path as name, images.path as key, rejected, draws, times_expected,
    drawn.loss, crop_loss, scale, words.text as caption, warnings, duplicate_of, original.path as original,
    concat_ws('; ', nullif(checks.detail, ''), 'like ' || original.path) as warned,
    case when rejected is not null then rejected || case when images.detail = '' then '' else ': ' || images.detail end
        else width || ' x ' || height || coalesce(', ' || words.text, ', no caption') end as text
from images left join ({FIRST_CAPTION}) as words on rejected is null and images.image_id = words.image_id
left join ({DRAWN}) as drawn on rejected is null and images.image_id = drawn.image_id
left join ({CROPPED}) as cropped on rejected is null and images.image_id = cropped.image_id
left join hurting using (path, draws)
left join checks on rejected is null and images.image_id = checks.image_id
left join (
    select image_id, min(path) as path from images where rejected is null and use is distinct from 'reference' group by image_id
) as original
    on original.image_id = duplicate_of
""",
            {
                "rejected": "rejected is not null",
                "duplicates": "rejected = 'duplicate'",
                "near-duplicates": "duplicate_of is not null",
                "blurred": "list_contains(string_split(warnings, ', '), 'blurred')",
                "small": "list_contains(string_split(warnings, ', '), 'small')",
                "any warning": "warnings <> ''",
                "without caption": "rejected is null and caption is null",
                "enlarged": "scale > 1",
                "much cropped": "crop_loss > 0.2",
                "never drawn": "rejected is null and draws is null",
                "loss above expected": "times_expected > 1.1",
            },
            {
                "path": "name",
                "highest loss": "loss desc nulls last",
                "highest corrected loss": "times_expected desc nulls last",
                "most cropped": "crop_loss desc nulls last",
                "most enlarged": "scale desc nulls last",
                "most drawn": "draws desc nulls last",
                "near-duplicates together": "coalesce(original, name), name",
            },
            "concat_ws(' ', name, caption)",
        ),
        Listing("Images that are not trained on", "select path, stage, reason from unused"),
    ),
)
CAPTIONS = Page(
    "captions",
    "Captions",
    (
        Editor(
            "Captions",
            """
select captions.image_id || ':' || position as key, path as name, text, 'image_folder/' || path as picture,
    source = 'edit' as edited
from captions join (
    select image_id, min(path) as path from images where rejected is null and use is distinct from 'reference' group by image_id
) using (image_id)
where role = 'caption' order by path, position
""",
            "stages.text_to_image.captions.edits:write_edits",
            "stages.text_to_image.captions.stage:read_edits",
            "An edit is kept in captions.edits.jsonl of the project; the image folder is not changed. An edited text is used "
            "as it is, without the template. After editing: make train, or latentmill captions. The caption files beside the "
            "images are written only by the button, which can be undone.",
            "captions",
            "stages.text_to_image.captions.edits:write_sidecars",
            "stages.text_to_image.captions.edits:undo_sidecars",
        ),
    ),
)
TRAINING = Page(
    "training",
    "Training",
    (
        Chart(
            "Loss by noise level",
            """
select run_name || ', sigma ' || floor(sigma * 4) / 4 || ' to ' || (floor(sigma * 4) + 1) / 4 as series,
    step // stretch * stretch as x, avg(loss) as y
from all_train, (select greatest(1, max(step) // 40) as stretch from all_train)
where split = 'train' and isfinite(loss) and run in (select run from runs where current) and sigma < 1
group by all order by series, x
""",
            "step",
            "loss",
        ),
        Chart(
            "Held-out loss by noise level, present run",
            """
select 'sigma ' || floor(sigma * 4) / 4 || ' to ' || (floor(sigma * 4) + 1) / 4 as series, step as x, avg(loss) as y
from train where split = 'validation' and isfinite(loss) and sigma < 1 group by all order by series, x
""",
            "step",
            "loss",
        ),
        Listing(
            "Images whose loss is above what noise level and step explain",
            "select 'image_folder/' || path as picture, path, draws, times_expected, excess_error as error, raw_loss "
            "from hurting order by excess desc limit 20",
        ),
    ),
)
SAMPLES = Page(
    "samples",
    "Samples",
    (
        Sheet(
            "Previews by prompt and run",
            """
select prompt || case when seed = 0 then '' else ', seed ' || seed end as row, coalesce(run_name, 'base') as column, step,
    'samples/' || recipe || '/' || path as picture
from all_samples
order by run_name nulls first, prompt, seed, step
""",
        ),
        Listing(
            "Pictures of latentmill generate",
            "select 'generated/' || recipe || '/' || path as picture, prompt, seed, step, strength, "
            "width || ' x ' || height as size from generated order by prompt, seed, step, strength",
        ),
    ),
)
SCORES = Page(
    "scores",
    "Scores",
    (
        Chart(
            "Style by step: 0 is the base, 1 the training images",
            "select 'style' as series, step as x, avg(style) as y from scores where kind <> 'real' group by all order by x",
            "step",
            "style",
        ),
        Listing(
            "Means by what drew the picture",
            "select kind, step, count(*) as pictures, avg(style) as style, avg(real) as real "
            "from scores group by kind, step order by kind, step",
        ),
    ),
)
PAGES = (IMAGES, CAPTIONS, TRAINING, SAMPLES, SCORES)
DETAIL = Detail(
    "select 'image_folder/' || path as picture, width, height from images where path = $text",
    """
select resolution || ' px' as label,
    crop_x as x, crop_y as y, crop_w as width, crop_h as height
from buckets join images using (image_id) where images.path = $text and buckets.rejected is null order by resolution
""",
    """
select 'mask of the crop at ' || latents.width || ' x ' || latents.height as label, latents.width // 16 as columns, mask as values
from latents join images using (image_id)
where images.path = $text and latents.rejected is null and mask is not null and not flip order by latents.width, latents.height
""",
    "stages.text_to_image.pages:mask_picture",
)


def mask_picture(columns: int, values: bytes) -> bytes:
    """A mask (one byte per value, 255 is white) as a WebP picture, 8 x 8 pixels per value."""
    import io

    from PIL import Image

    small = Image.frombytes("L", (columns, len(values) // columns), values)
    out = io.BytesIO()
    small.resize((small.width * 8, small.height * 8), Image.Resampling.NEAREST).save(out, "WEBP", lossless=True)
    return out.getvalue()


def thumbnail(path: object, longest: int) -> bytes:
    """WebP, upright. Raises ValueError if the file is no picture that can be read."""
    import io

    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:  # type: ignore[arg-type]
            # Lets a JPEG be decoded at a fraction of its size.
            image.draft("RGB", (longest, longest))
            small = ImageOps.exif_transpose(image).convert("RGB")
            small.thumbnail((longest, longest))
            out = io.BytesIO()
            small.save(out, "WEBP", quality=85)
            return out.getvalue()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no picture that can be read: {error}") from None
