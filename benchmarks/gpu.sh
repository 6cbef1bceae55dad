#!/usr/bin/env bash
# Measure on one NVIDIA GPU, in at most ten minutes, what docs/speed.md says on GPUs:
#
#     benchmarks/gpu.sh gpu_results
#     benchmarks/gpu.sh gpu_results --minutes 5
#     benchmarks/gpu.sh gpu_results --device cpu --quick    # the same on tiny models, without a GPU
#
# The first argument is the folder for tables.md, results.json, chart.png and log.txt. PYTHON names the interpreter;
# the default is the project's .venv, or else python3.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:?"Name the output folder first: benchmarks/gpu.sh gpu_results"}
shift
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
for package in torch transformers peft pytest; do
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)" || {
        echo "$python has no $package. Install what is missing: $python -m pip install -e '$root[test]' matplotlib" >&2
        exit 1
    }
done
mkdir -p "$folder"
"$python" "$root/benchmarks/gpu.py" "$folder" "$@" 2>&1 | tee "$folder/log.txt"
