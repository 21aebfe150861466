# %% [markdown]
# # The Python API on the example
#
# Open this file as a notebook (VS Code, or `jupytext --to ipynb`), or run it as a script from the checkout's folder.
# A `Project` is a folder with a project.toml; settings can be overridden by name.

# %%
import mlx.core as mx

from pipeline import Project

p = Project("data/projects/example", {"train.steps": 200, "train.checkpoint_every": 100})

# %% [markdown]
# What is built, and what the next run would do:

# %%
for state in p.status():
    print(state)

# %% [markdown]
# Run a stage and all stages that it depends on. Finished rows are kept, so a second run takes a moment.

# %%
outcome = p.run("train", upstream=True)
print(outcome.stage_name, outcome.rows, "rows,", round(outcome.seconds), "seconds")

# %% [markdown]
# A table: its rows as Arrow, and the tensor of one row, memory-mapped, as NumPy or MLX.

# %%
rows = p["images"].to_arrow()
key = p["latents"].to_arrow()["latent_id"][0].as_py()
x = p["latents"][key]
print(rows.num_rows, "images; latent", x.shape, x.dtype, mx.array(x).dtype)

# %% [markdown]
# Any question in SQL, answered as an Arrow table (`to_pandas()` needs pandas), and the panels that the pipeline defines:

# %%
print(p.sql("select path, width, height from images order by path limit 3").to_pylist())
print(p.panel("loss").to_pylist())

# %% [markdown]
# Draw with the trained adapter. A picture is a Pillow image.

# %%
picture = p.adapter().generate("ohwx, a lion", seed=0)
picture.save(p.path / "lion.png")
