#!/bin/sh
# Measure all GPU cases in one command, on a machine with CUDA: tests/bench/gpu.sh [FOLDER] [OPTION...]
# FOLDER (default: build) gets bench.jsonl, one row per case, and bench.md, the page. The OPTIONs are those of
# `python -m tests.bench.measure`; the default is --gpu. The variable PYTHON names the
# interpreter; LATENTMILL_COMMIT names the commit, where git cannot say it.
export PYTHONUNBUFFERED=1
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
folder=${1:-build}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- --gpu
if ! "$python" -c 'import sys, mlx.core as mx; sys.exit(not mx.cuda.is_available())' 2>/dev/null; then
    echo "MLX sees no CUDA device: pip uninstall mlx-cpu; pip install 'mlx[cuda13]>=0.32,<0.34', or mlx[cuda12] for a driver of CUDA 12" >&2
    exit 1
fi
"$python" -m tests.bench.measure --out "$folder/bench.jsonl" "$@"
code=$?
"$python" -m tests.bench.measure --table "$folder/bench.jsonl" >"$folder/bench.md" && echo "page: $folder/bench.md"
exit $code
