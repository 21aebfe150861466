"""Benchmarks of training, encoding and reading: `make bench`, and tests/bench/gpu.sh on a CUDA machine.

`measure` is the command, `suites` lists the cases, `run` measures one case in its own process, `page` writes data/docs/bench.md.
They import pipeline, stages and schemas.
"""
