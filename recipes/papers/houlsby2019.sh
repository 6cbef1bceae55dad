#!/usr/bin/env bash
# Houlsby et al. 2019 (arXiv 1902.00751): every table and figure, with BERT from the Hub. Run it from the repository,
# or copy the lines that you need: interrupted commands resume, and --dry_run prints a sweep's commands. Each run keeps
# its best epoch on validation; the paper's code scores the last one: --load_best_model_at_end false.
set -euo pipefail
additional=${ADDITIONAL:-additional}  # the folder of the 17 further tasks, see docs/papers.md
large=google-bert/bert-large-uncased base=google-bert/bert-base-uncased
tasks="cola sst2 mrpc stsb qqp mnli qnli rte"
# What the paper's code has, for recipes without presets.
code="--weight_decay 0.01 --adam_epsilon 1e-6 --train_sampling_strategy random"

# Table 1. To choose by accuracy as the paper says, add --metric_for_best_model accuracy for cola, mrpc and qqp.
python recipes/sweep.py recipes/glue.py --task all --preset houlsby2019 --method houlsby --r 8 64 256 \
    --learning_rate 3e-5 3e-4 3e-3 --num_train_epochs 3 20 --seed 0 1 2 3 4 --search_seeds 1 --predict \
    --output_dir runs/h1
python recipes/sweep.py recipes/glue.py --task all --preset houlsby2019 --method full --learning_rate 3e-5 \
    --num_train_epochs 3 --seed 0 1 2 3 4 --predict --output_dir runs/h1
# MNLI-mm is tuned as a task of its own.
python recipes/sweep.py recipes/glue.py --task mnli --preset houlsby2019 --method houlsby --r 8 64 256 \
    --learning_rate 3e-5 3e-4 3e-3 --num_train_epochs 3 20 --seed 0 1 2 3 4 --search_seeds 1 --predict \
    --metric_for_best_model mismatched_accuracy --output_dir runs/h1/mnli_mm
python recipes/sweep.py recipes/glue.py --task mnli --preset houlsby2019 --method full --learning_rate 3e-5 \
    --num_train_epochs 3 --seed 0 1 2 3 4 --predict --metric_for_best_model mismatched_accuracy \
    --output_dir runs/h1/mnli_mm
python recipes/study_table.py runs/h1                                             # adapters (64)
python recipes/study_table.py runs/h1 --choose r learning_rate num_train_epochs  # adapters (8-256)

# Table 2, and figure 3 for the additional tasks
python recipes/sweep.py recipes/paper_tasks.py --data "$additional" --task all --method houlsby --r 2 4 8 16 32 64 \
    --learning_rate 1e-5 3e-5 1e-4 3e-3 --num_train_epochs 20 50 100 --choose r learning_rate num_train_epochs \
    --seed 0 1 2 --search_seeds 1 --train_layer_norm all $code --base_dtype float32 --output_dir runs/h2
python recipes/sweep.py recipes/paper_tasks.py --data "$additional" --task all --method full \
    --learning_rate 1e-5 3e-5 1e-4 3e-3 --num_train_epochs 20 50 100 --seed 0 1 2 --search_seeds 1 $code \
    --output_dir runs/h2
python recipes/sweep.py recipes/paper_tasks.py --data "$additional" --task all --method top_k \
    --top_k 1 2 3 5 7 9 11 12 --learning_rate 1e-5 3e-5 1e-4 3e-3 --num_train_epochs 20 50 100 \
    --choose top_k learning_rate num_train_epochs --seed 0 1 2 --search_seeds 1 $code --output_dir runs/h2
python recipes/no_bert.py --data "$additional"/* --n_points 50 --n_jobs 8 --output_dir runs/no_bert
python recipes/study_table.py runs/h2 --choose r top_k learning_rate num_train_epochs
python recipes/figure.py tradeoff runs/h2
python recipes/figure.py curves runs/h2  # by which the paper chose the epochs

# Figures 1 and 3
python recipes/sweep.py recipes/glue.py --task $tasks --preset houlsby2019 --method houlsby top_k \
    --r 2 4 8 16 32 64 128 256 512 --top_k 1 2 3 5 7 9 11 12 18 24 --learning_rate 3e-5 3e-4 3e-3 \
    --num_train_epochs 3 20 --seed 0 --output_dir runs/h3
python recipes/sweep.py recipes/glue.py --task $tasks --preset houlsby2019 --method full --learning_rate 3e-5 \
    --num_train_epochs 3 --seed 0 --output_dir runs/h3
python recipes/figure.py tradeoff runs/h3

# Figure 4
python recipes/sweep.py recipes/glue.py --task mnli cola --preset houlsby2019 --model_name $base \
    --method houlsby layer_norm top_k full --r 1 2 4 8 16 32 64 128 256 512 --top_k $(seq 12) \
    --learning_rate 3e-5 3e-4 3e-3 --num_train_epochs 3 20 --seed 0 1 2 --search_seeds 1 --output_dir runs/h4
python recipes/figure.py tradeoff runs/h4/mnli
python recipes/figure.py tradeoff runs/h4/cola

# Figure 5
python recipes/sweep.py recipes/squad.py --model_name $large --method houlsby --r 2 8 64 256 \
    --learning_rate 3e-5 1e-4 3e-4 1e-3 --num_train_epochs 3 10 20 --seed 0 1 2 --search_seeds 1 \
    --train_layer_norm all $code --base_dtype float32 --output_dir runs/h5
python recipes/sweep.py recipes/squad.py --model_name $large --method top_k full --top_k 1 2 3 5 7 9 11 12 18 24 \
    --learning_rate 3e-5 5e-5 1e-4 --num_train_epochs 2 3 5 --seed 0 1 2 --search_seeds 1 $code --output_dir runs/h5
python recipes/figure.py tradeoff runs/h5

# Figure 6, left and center, by accuracy; the trained norms stay unless --norms remove is given
for task in mnli cola; do
    accelerate launch recipes/glue.py --task $task --preset houlsby2019 --model_name $base --output_dir runs/h6_$task
    python recipes/figure.py ablation runs/h6_$task
done

# Figure 6, right
python recipes/sweep.py recipes/glue.py --task mnli cola --preset houlsby2019 --model_name $base --r 64 \
    --init_std 1e-7 1e-6 1e-5 1e-4 1e-3 1e-2 1e-1 1 --learning_rate 3e-5 3e-4 3e-3 --seed 0 1 2 \
    --output_dir runs/h6_init
python recipes/figure.py init_scale runs/h6_init

# Section 3.6: sizes 8, 64, 256
python recipes/sweep.py recipes/glue.py --task cola sst2 mrpc qqp mnli qnli rte --preset houlsby2019 --r 8 64 256 \
    --init_std 1e-2 --learning_rate 3e-5 3e-4 3e-3 --num_train_epochs 3 20 --seed 0 --output_dir runs/h36
python recipes/figure.py init_scale runs/h36

# Section 3.6: variants, whose adapters cannot be loaded again, so the runs end with the last epoch
python recipes/sweep.py recipes/variants.py --task mnli cola --preset houlsby2019 --model_name $base \
    --variant paper layer_norm batch_norm two_layers tanh relu swish attention_only parallel parallel_gated \
    --seed 0 1 2 --save_strategy no --load_best_model_at_end false --output_dir runs/h36_variants
python recipes/figure.py variants runs/h36_variants
