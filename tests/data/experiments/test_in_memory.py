"""Stages in memory, with which the experiments compute."""

import numpy as np

from data.research.experiments.in_memory import MemoryTables
from pipeline.project.project import Project
from pipeline.project.stage_run import ArrayReader
from tests import harness, projects


def test_stages_in_memory_compute_the_rows_that_the_runner_stores(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=3)
    tables = MemoryTables(tmp_path / "memory")
    for name in ("images", "captions", "buckets", "latents", "embeddings", "train"):
        projects.build(folder, name)
        project = Project(folder)
        schema = project.stage(name).writes
        stored, found = project.current(name).rows(), tables.run(project, name)
        compared = [column for column in harness.compared(schema) if column in stored.column_names]
        keys = [(key, "ascending") for key in schema.key]
        assert found.select(compared).sort_by(keys).equals(stored.select(compared).sort_by(keys)), name
        if schema.tensors:
            key = found[schema.key[0]][0].as_py()
            with_runner = project.open("train").inputs.tensors(schema).read(key)
            assert np.array_equal(with_runner, ArrayReader(found, schema).read(key))
