"""SQL views and panels of text_to_image: `latentmill query` knows the views by name, `latentmill panel` shows the panels."""

from stages.pipelines import Panel, View

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
    """
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
from per_image join (
    select image_id, min(path) as path from images where rejected is null and use is distinct from 'reference' group by image_id
) using (image_id)
order by excess desc
""",
    "images by their loss, corrected for noise level and step. times_expected = exp(excess); excess is the mean over the "
    "image's samples, weighted by sigma^2, of a - (mean of a over the 200 samples nearest in step), where a = ln(loss) - "
    "(mean of ln(loss) over the 100 samples nearest in noise level)",
    needs=("images", "train"),
)
TRAINED = View(
    """
select train.*, file.path, buckets.resolution, words.text
from train
left join (
    select image_id, min(path) as path from images where rejected is null and use is distinct from 'reference' group by image_id
) as file using (image_id)
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
        "with held as (select step, round(sigma, 4) as level, latent_id, loss from train "
        "where split = 'validation' and isfinite(loss)), "
        "first as (select level, latent_id, loss as start from held where step = (select min(step) from held) and loss > 0) "
        "select level, step, avg(loss) as loss, avg(loss / start) - 1 as change, "
        "stddev_samp(loss / start) / sqrt(count(*)) as error, count(*) as images "
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
    Panel("disk", "Rows and bytes of every table", "select stage, built, rows, dead, bytes from tables"),
)
