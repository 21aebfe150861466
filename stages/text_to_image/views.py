"""SQL views and panels of text_to_image: `latentmill query` knows the views by name, `latentmill panel` shows the panels."""

from stages.stage import Panel, View

# An image counts as unused once, at the first table where it drops out. It is used if one of its buckets or crops is trained.
UNUSED = View(
    """
with usable as (select path, image_id from images where rejected is null),
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
select path, image_id, arg_min(stage, place), arg_min(reason, place)
from usable join dropped using (image_id) group by path, image_id
order by stage, path
""",
    "images that are not trained on: the table where each drops out, and why",
    needs=("images",),
)
VIEWS = {"unused": UNUSED}

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
        "unused",
        "Images that are not trained on, by the table where they drop out and the reason",
        "select stage, reason, count(*) as images, min(path) as example from unused "
        "group by all order by images desc, stage, reason",
    ),
    Panel("disk", "Rows and bytes of every table", "select stage, built, rows, dead, bytes from tables"),
)
