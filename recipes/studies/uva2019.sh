#!/usr/bin/env bash
# The reproduction of Whritenour and Schoch 2019: accuracy of MRPC and CoLA after the last epoch, and their mean. Like
# the code that they ran, it also trains the norms, which their number of parameters leaves out. See houlsby2019.sh on
# how to use it.
source "$(dirname "${BASH_SOURCE[0]}")/common.bash"
attempt python recipes/studies/sweep.py recipes/glue.py --task mrpc cola --preset uva2019 --method houlsby full \
    --load_best_model_at_end false --seed 0 --output_dir runs/u $glue_data ${FLAGS-} ${DRY_RUN-}
after python recipes/studies/study_table.py runs/u --score accuracy
