#!/usr/bin/env bash
# Measure on one NVIDIA GPU, in at most ten minutes, what docs/speed.md says on GPUs:
#
#     benchmarks/gpu.sh gpu_results
#     benchmarks/gpu.sh gpu_results --device cpu --quick    # the same on tiny models, without a GPU
#
# The first argument is the folder for tables.md, results.json and log.txt. PYTHON names the interpreter; the default is
# the project's .venv, or else python3.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:?"Name the output folder first: benchmarks/gpu.sh gpu_results"}
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import houlsby_peft, pytest' ||
    { echo "Install what the kit needs: $python -m pip install -e '$root[test]'"; exit 1; }
mkdir -p "$folder"
"$python" "$root/benchmarks/gpu.py" "$@" 2>&1 | tee -a "$folder/log.txt"
