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
# Read what is installed without importing it: houlsby_peft cannot be imported where it is not installed.
"$python" - "$root" <<'END'
import re
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, version

root, found = sys.argv[1], []
setup = ConfigParser(interpolation=None)
setup.read(f"{root}/setup.cfg")
for needed in ["houlsby-peft", "pytest", *setup["options"]["install_requires"].split()]:
    name, _, least = needed.partition(">=")
    try:
        own = version(name)
    except PackageNotFoundError:
        found.append(f"no {name}")
    else:
        if [int(part) for part in re.findall(r"\d+", own)[:2]] < [int(part) for part in re.findall(r"\d+", least)[:2]]:
            found.append(f"{name} {own}")
if found:
    sys.exit(
        f"The kit needs houlsby-peft, pytest and the versions in setup.cfg; {sys.executable} has {', '.join(found)}. "
        f"Install them: {sys.executable} -m pip install -e '{root}[test]' matplotlib (houlsby-peft alone, without a "
        f"package index: {sys.executable} -m pip install --no-deps --no-build-isolation -e '{root}')"
    )
END
mkdir -p "$folder"
"$python" "$root/benchmarks/gpu.py" "$folder" "$@" 2>&1 | tee -a "$folder/log.txt"
