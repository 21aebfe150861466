#!/bin/sh
# All GPU cases in one command, on a machine with CUDA: tests/bench/gpu.sh [FOLDER] [OPTION...]
# FOLDER (build) gets bench.jsonl, a row per case, and bench.md, the page. OPTION is one of `python -m tests.bench.measure`: --bars or --large
# in place of --gpu, which is both. PYTHON names the interpreter, LATENTMILL_COMMIT the commit where git is not there to ask.
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
"$python" -m tests.bench.measure --table "$folder/bench.jsonl" >"$folder/bench.md" && echo "the page: $folder/bench.md"
exit $code
