"""What the page, `latentmill query` and `latentmill panel` show of text_to_image: SQL views, panels, and pages of blocks."""

from __future__ import annotations

from pathlib import Path

from stages.pipelines import Cards, Chart, Detail, Editor, Field, Form, Listing, Page, Panel, Sheet, View

# image_id and one path of every image that may be trained
FIRST_PATH = (
    "select image_id, min(path) as path from images where rejected is null and use is distinct from 'reference' group by image_id"
)

# An image counts as unused once, at the first table where it drops out. It is used if one of its buckets or crops is trained.
UNUSED = View(
    """
with usable as (select path, image_id from images where rejected is null and use is distinct from 'reference'),
dropped(place, stage, image_id, reason) as (
    select 2, 'captions', image_id, 'no caption' from usable
    where (select built from tables where stage = 'captions')
      and image_id not in (select image_id from captions where role = 'caption')
    union all
    select 3, 'buckets', image_id, string_agg(distinct rejected, ', ' order by rejected) from buckets
    group by image_id having bool_and(rejected is not null)
    union all
    select 4, 'latents', image_id, string_agg(distinct rejected, ', ' order by rejected) from latents
    group by image_id having bool_and(rejected is not null)
)
select path, image_id, 'images' as stage, rejected || case when detail = '' then '' else ': ' || detail end as reason
from images where rejected is not null
union all
select path, image_id, 'images', 'a reference, but no image has its name' from images
where use = 'reference' and reference_of is null
union all
select path, image_id, arg_min(stage, place), arg_min(reason, place)
from usable join dropped using (image_id) group by path, image_id
order by stage, path
""",
    "images that are not trained on: the table where each drops out, and why",
    needs=("images",),
)

# A sample's raw loss says mostly which noise level was drawn: the loss at one level is several times that at another. The mean of
# its neighbours by noise level is what such a sample costs; what is left is corrected by its neighbours in time in the same way.
# Samples count by the square of their noise level: at high levels the loss says whether picture and caption belong to the set, at
# low levels how much detail the picture has.
HURTING = View(
    f"""
with drawn as (
    select image_id, step, sigma::double as sigma, loss, ln(loss) as log_loss from train
    where split = 'train' and loss > 0 and isfinite(loss)
),
level as (
    select *, log_loss - avg(log_loss) over (
        order by sigma, step, image_id rows between 50 preceding and 50 following exclude current row) as above_level
    from drawn
),
time as (
    select *, above_level - avg(above_level) over (
        order by step, sigma, image_id rows between 100 preceding and 100 following exclude current row) as above
    from level
),
per_image as (
    select image_id, count(*) as draws, sum(sigma * sigma * above) / nullif(sum(sigma * sigma), 0) as excess,
        sqrt(greatest(sum(pow(sigma, 4) * above * above) - 2 * excess * sum(pow(sigma, 4) * above)
            + excess * excess * sum(pow(sigma, 4)), 0)) / nullif(sum(sigma * sigma), 0) as excess_error,
        avg(loss) as raw_loss
    from time group by image_id
)
select path, image_id, draws, exp(excess) as times_expected, excess, excess_error, raw_loss
from per_image join ({FIRST_PATH}) using (image_id)
order by excess desc
""",
    "images by their loss, corrected for noise level and step. times_expected = exp(excess); excess is the mean over the "
    "image's samples, weighted by sigma^2, of a - (mean of a over the 200 samples nearest in step), where a = ln(loss) - "
    "(mean of ln(loss) over the 100 samples nearest in noise level)",
    needs=("images", "train"),
)
TRAINED = View(
    f"""
select train.*, file.path, buckets.resolution, words.text
from train
left join ({FIRST_PATH}) as file using (image_id)
left join latents using (latent_id)
left join buckets on buckets.rejected is null and latents.image_id = buckets.image_id and latents.width = buckets.width
    and latents.height = buckets.height
left join (select caption_id, min(text) as text from captions group by caption_id) as words
    on words.caption_id = train.caption_id
""",
    "the rows of train with the path of the image, the resolution and the text",
    needs=("train",),
)
STEPS = View(
    """
select step, split, count(*) as samples, avg(loss) as loss, any_value(lr) as lr, any_value(grad_norm) as grad_norm,
    case when split = 'train' then max(seconds) end as seconds, max(read_seconds) as read_seconds, max(peak_bytes) as peak_bytes
from train group by step, split order by step, split
""",
    "one row per step and split: the mean loss, and the facts about the step once",
    needs=("train",),
)
PREVIEWS = View(
    """
select samples.*, (select folder from tables where stage = 'samples') || '/artifacts/' || path as file from samples
""",
    "the rows of samples with the full path of the picture",
    needs=("samples",),
)
VIEWS = {"unused": UNUSED, "hurting": HURTING, "trained": TRAINED, "steps": STEPS, "previews": PREVIEWS}

LACKS = {"captions missing": "select count(*) as n from unused where stage = 'captions'"}

# The previews of prompts that look most like the training images, for `latentmill best` without held-out images.
RANKING = Panel(
    "style",
    "mean score `style`",
    "select adapter_id, avg(style) as score from scores where kind = 'adapter' group by adapter_id",
)

PANELS = (
    Panel(
        "loss",
        "Mean training loss by hundred steps",
        "select (step - 1) // 100 * 100 + 1 as first_step, max(step) as last_step, count(*) as samples, avg(loss) as loss "
        "from train where split = 'train' group by 1 order by 1",
    ),
    Panel(
        "validation",
        "Loss of held-out images by step, and by quarter of the noise level: 0-0.25 is nearly clean, 0.75-1 nearly noise",
        "select step, avg(loss) as loss, avg(loss) filter (sigma < 0.25) as '0-0.25', "
        "avg(loss) filter (sigma >= 0.25 and sigma < 0.5) as '0.25-0.5', "
        "avg(loss) filter (sigma >= 0.5 and sigma < 0.75) as '0.5-0.75', avg(loss) filter (sigma >= 0.75) as '0.75-1' "
        "from train where split = 'validation' group by step order by step",
    ),
    Panel(
        "levels",
        "Loss of held-out images at each noise level, and its mean change since the first measurement, with its standard error "
        "over the images. It says how well noise is told from images like these, and where the run begins to learn its images by "
        "heart. It does not say how much of the style the previews show: a style can still grow while this loss rises",
        "with held as (select step, round(sigma, 4) as level, image_id, latent_id, loss from train "
        "where split = 'validation' and isfinite(loss)), "
        "first as (select level, latent_id, loss as start from held where step = (select min(step) from held) and loss > 0) "
        "select level, step, avg(loss) as loss, avg(loss / start) - 1 as change, "
        "stddev_samp(loss / start) / sqrt(count(*)) as error, count(distinct image_id) as images "
        "from held join first using (level, latent_id) group by level, step order by level, step",
    ),
    Panel(
        "checks",
        "Images with warnings, and the image that a near-duplicate repeats",
        "select checks.path, warnings, checks.detail, original.path as duplicate_of, round(blur, 2) as blur "
        "from checks left join images as original on original.image_id = duplicate_of and original.rejected is null "
        "where warnings <> '' order by warnings, checks.path",
    ),
    Panel(
        "unused",
        "Images that are not trained on, by the table where they drop out and the reason",
        "select stage, reason, count(*) as images, min(path) as example from unused "
        "group by all order by images desc, stage, reason",
    ),
    Panel(
        "hurting",
        "Images whose loss is above what their noise levels and steps explain (1 is as expected)",
        "select path, draws, round(times_expected, 3) as times_expected, round(excess_error, 3) as error, raw_loss from hurting "
        "order by excess desc limit 20",
    ),
    Panel("disk", "Rows and bytes of every table", "select stage, built, rows, dead as to_clean, bytes from tables"),
)


# Pages

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
left join ({FIRST_PATH}) as original
    on original.image_id = duplicate_of
""",
            {
                "rejected": "rejected is not null",
                "duplicates": "rejected = 'duplicate'",
                "near-duplicates": "duplicate_of is not null",
                "blurred": "list_contains(string_split(warnings, ', '), 'blurred')",
                "small": "list_contains(string_split(warnings, ', '), 'small')",
                "any warning": "warnings <> ''",
                "without caption": "rejected is null and (coalesce(caption, '') = '' "
                "or caption in (select text from captions where role = 'trigger'))",
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
            f"""
select captions.image_id || ':' || position as key,
    path as name, captions.text, 'image_folder/' || path as picture,
    source = 'edit' as edited, case when position = 0 then descriptions.text end as suggestion
from captions join ({FIRST_PATH}) using (image_id)
left join (select image_id, text from descriptions) as descriptions using (image_id)
where role = 'caption' order by path, position
""",
            "stages.text_to_image.captions.edits:write_edits",
            "stages.text_to_image.captions.stage:read_edits",
            "An edit is kept in captions.edits.jsonl of the project; the image folder is not changed. An edited text is used "
            "as it is, without the template. After editing: make train, or latentmill captions. The caption files beside the "
            "images are written only by the button, which can be undone.",
            "captions",
            "stages.text_to_image.captions.edits:present_texts",
            "stages.text_to_image.captions.edits:newer_than_edits",
            "stages.text_to_image.captions.edits:write_sidecars",
            "stages.text_to_image.captions.edits:undo_sidecars",
            "stages.text_to_image.captions.edits:written_batches",
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
from all_train, (select greatest(1, max(steps) // 40) as stretch from runs where stage = 'train')
where split = 'train' and isfinite(loss) and run = (select max(run) from runs where current and stage = 'train') and sigma < 1
group by all order by series, x
""",
            "step",
            "loss",
        ),
        Chart(
            "Loss of held-out pictures, which are not trained on ([train.validation]), by noise level, present run",
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
select prompt || case when seed = 0 then '' else ', seed ' || seed end as row,
    coalesce(run_name, 'base') || case when families = 1 then '' else ', ' || family end
        || case when adapter_id like '%*%' then ' x ' || split_part(adapter_id, '*', 1) else '' end as column,
    step, 'samples/' || recipe || '/' || path as picture
from all_samples, (select count(distinct family) as families from all_samples)
order by run_name nulls first, family, prompt, seed, step
""",
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
WHICH = (
    Field("--which", "Adapter", "last", ("last", "best", "average")),
    Field("--step", "Checkpoint of step, empty: the adapter's"),
)
DRAW = Page(
    "draw",
    "Draw",
    (
        Form(
            "Draw a picture",
            "generate",
            "Draw",
            (
                Field("", "Prompt, with the trigger word", wanted=True),
                Field("--adapter", "Adapter", "last", ("last", "best", "average", "none")),
                WHICH[1],
                Field("--strength", "Strength, empty: 1, as trained"),
                Field("--seed", "Seed, empty: 0"),
                Field("--size", "Width x height in pixels"),
                Field("--family", "Model, empty: that of the settings; klein-4b for an adapter of klein-base-4b takes 4 steps"),
                Field("--steps", "Denoising steps"),
                Field("--guidance", "Guidance scale"),
                Field(
                    "--reference",
                    "Pictures to start from, for edit training: their names on the page Images, one a line; empty: none",
                    pictures="image_folder",
                    of=lambda family: family.references != "none",
                ),
            ),
            "Empty fields are as in [samples] of the settings. A picture that was drawn before is not drawn again.",
        ),
        Cards(
            "Pictures",
            "select 'generated/' || recipe || '/' || path as picture, prompt as name, "
            "'seed ' || seed || case when step is null then '' else ', step ' || step end || ', strength ' || strength || ', ' "
            "|| width || ' x ' || height || ', ' || family as text, seed, step from generated",
            orders={"prompt": "name, seed, step", "step": "step, name, seed"},
            searched="name",
        ),
    ),
)
EXPORT = Page(
    "export",
    "Export",
    (
        Form(
            "Write the adapter as a file",
            "export",
            "Write the file",
            (Field("--style", "Names for", "diffusers", ("diffusers", "comfyui")), *WHICH),
            "diffusers: for diffusers and ComfyUI; comfyui: the reference's names, for programs that read only those.",
        ),
        Form(
            "Write the whole model, with the adapter in it",
            "export --merged",
            "Write the model",
            WHICH,
            "The transformer as a folder for diffusers, as large as the base's.",
        ),
        Form(
            "Write a folder for the Hugging Face hub",
            "publish",
            "Write the folder",
            (
                *WHICH,
                Field("--licence", "Licence of the adapter, empty: the base model's"),
                Field("--data-licence", "Whose the pictures are, and their licence"),
            ),
            "The adapter, a model card, the settings and the previews. Nothing is uploaded.",
            "exports",
        ),
    ),
)
PAGES = (IMAGES, CAPTIONS, TRAINING, SAMPLES, SCORES, DRAW, EXPORT)
DETAIL = Detail(
    f"""
select 'image_folder/' || path as picture, width, height,
    path in (select path from ({FIRST_PATH})) and path not in (select path from unused) as trained
from images where path = $text
""",
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
    cards="images",
    texts="captions",
    rate="train.data.repeats",
)


def mask_picture(columns: int, values: bytes) -> bytes:
    """A mask (one byte per value, 255 is white) as a WebP picture, 8 x 8 pixels per value."""
    import io

    from PIL import Image

    small = Image.frombytes("L", (columns, len(values) // columns), values)
    out = io.BytesIO()
    small.resize((small.width * 8, small.height * 8), Image.Resampling.NEAREST).save(out, "WEBP", lossless=True)
    return out.getvalue()


def thumbnail(path: Path, longest: int, background: str) -> bytes:
    """WebP, upright, with the colours that are trained. Raises ValueError if the file is no picture that can be read."""
    import io

    from stages.text_to_image.imaging.decode import ROOM, ImageError, open_file, open_image, pixel_count

    try:
        with open_file(path) as file, ROOM.taken(pixel_count(file)):
            small = open_image(file, background, at_least=longest)
            small.thumbnail((longest, longest))
    except ImageError as error:
        raise ValueError(f"no picture that can be read: {error}") from None
    out = io.BytesIO()
    small.save(out, "WEBP", quality=85)
    return out.getvalue()
