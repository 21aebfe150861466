"""Tests, which mirror the folders of the program, and benchmarks in `bench`."""

import stages as stages  # loads a fast BLAS; a module that imports mlx.core first would multiply 30 times as slowly on Linux
