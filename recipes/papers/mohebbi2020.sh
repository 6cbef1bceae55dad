#!/usr/bin/env bash
# The re-implementation of Mohebbi and Rajaei 2020: every table and figure, with BERT-base from the Hub. See
# houlsby2019.sh on how to use it. The papers' test scores are the server's.
set -euo pipefail
additional=${ADDITIONAL:-additional}

# Tables 1 and 2
python recipes/sweep.py recipes/glue.py --task all --preset mohebbi2020 --method houlsby --share_layers 0 1 3 \
    --seed 0 --predict --output_dir runs/m2
python recipes/sweep.py recipes/glue.py --task all --preset mohebbi2020 --method full --seed 0 --predict \
    --output_dir runs/m2
python recipes/study_table.py runs/m2

# Table 3
python recipes/sweep.py recipes/paper_tasks.py --data "$additional" --task all --method houlsby --head two_layer \
    --init_std 1e-3 --learning_rate 1e-4 --num_train_epochs 50 --seed 0 --train_sampling_strategy random \
    --base_dtype float32 --output_dir runs/m3
python recipes/sweep.py recipes/paper_tasks.py --data "$additional" --task all --method full --learning_rate 3e-5 \
    --num_train_epochs 3 --seed 0 --train_sampling_strategy random --output_dir runs/m3
python recipes/study_table.py runs/m3

# Figure 8. The paper does not say which of its models it is; here it is "not shared".
accelerate launch recipes/glue.py --task cola --preset mohebbi2020 --output_dir runs/m8
python recipes/figure.py ablation runs/m8
