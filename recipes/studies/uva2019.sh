#!/usr/bin/env bash
# The reproduction of Whritenour and Schoch 2019: accuracy of MRPC and CoLA, and their mean. See houlsby2019.sh on
# how to use it.
set -euo pipefail
python recipes/studies/sweep.py recipes/glue.py --task mrpc cola --preset uva2019 --train_layer_norm false \
    --method houlsby full --seed 0 --output_dir runs/u ${FLAGS-} ${DRY_RUN-}
[ -n "${DRY_RUN-}" ] || python recipes/studies/study_table.py runs/u --score accuracy
