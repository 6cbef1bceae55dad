#!/usr/bin/env bash
# Houlsby et al. 2019 (arXiv 1902.00751): every table and figure, with BERT from the Hub. Run it from the repository,
# or copy the lines that you need: interrupted commands resume. DRY_RUN=--dry_run only prints the sweeps' plans, and
# GLUE, SQUAD and ADDITIONAL name folders of data, GLUE's with the test files (docs/papers.md).
# The presets compute in float32; for GPUs, FLAGS="--tf32 true" or FLAGS="--bf16 true" is faster.
# Each run keeps its best epoch on validation; the paper's code scores the last one: --load_best_model_at_end false.
source "$(dirname "${BASH_SOURCE[0]}")/common.bash"
base=google-bert/bert-base-uncased
tasks="cola sst2 mrpc stsb qqp mnli qnli rte"  # without WNLI, as in the paper
sweep() { attempt python recipes/studies/sweep.py "$@" --preset houlsby2019 ${FLAGS-} ${DRY_RUN-}; }
# Accuracy on validation chooses, as the paper says; STS-B has none and keeps Spearman's correlation.
glue() { sweep recipes/glue.py --metric_for_best_model accuracy $glue_data "$@"; }

# Table 1. The server asks for WNLI as well, which the paper leaves out. MNLI-mm, a task of its own in the paper,
# chooses among the runs of MNLI by its own score.
glue --task all --method houlsby --r 8 64 256 --learning_rate 3e-5 3e-4 3e-3 \
    --num_train_epochs 3 20 --seed 0 1 2 3 4 --search_seeds 1 --predict --output_dir runs/h1/table
glue --task all --method full --learning_rate 3e-5 3e-4 3e-3 \
    --num_train_epochs 3 20 --seed 0 1 2 3 4 --search_seeds 1 --predict --output_dir runs/h1/table
after python recipes/studies/study_table.py runs/h1/table                                             # adapters (64)
after python recipes/studies/study_table.py runs/h1/table --choose r learning_rate num_train_epochs  # adapters (8-256)

# Table 2, and figure 3 for the additional tasks
sweep recipes/studies/paper_tasks.py --data "$additional" --task all --method houlsby \
    --r 2 4 8 16 32 64 --learning_rate 1e-5 3e-5 1e-4 3e-3 --num_train_epochs 20 50 100 \
    --choose r learning_rate num_train_epochs --seed 0 1 2 --search_seeds 1 --output_dir runs/h2
sweep recipes/studies/paper_tasks.py --data "$additional" --task all --method full \
    --learning_rate 1e-5 3e-5 1e-4 3e-3 --num_train_epochs 20 50 100 --seed 0 1 2 --search_seeds 1 --output_dir runs/h2
sweep recipes/studies/paper_tasks.py --data "$additional" --task all --method top_k \
    --top_k 1 2 3 5 7 9 11 12 --learning_rate 1e-5 3e-5 1e-4 3e-3 --num_train_epochs 20 50 100 \
    --choose top_k learning_rate num_train_epochs --seed 0 1 2 --search_seeds 1 --output_dir runs/h2
after python recipes/studies/no_bert.py --data "$additional"/* --n_points 50 --n_jobs 8 --output_dir runs/h2
after python recipes/studies/study_table.py runs/h2 --choose r top_k learning_rate num_train_epochs
after python recipes/studies/figure.py tradeoff runs/h2 --split test --seeds best
# The curves by which the paper chose the epochs: a line for each number of epochs
after python recipes/studies/figure.py curves runs/h2 --choose r top_k learning_rate

# Figures 1 and 3, with the best of the seeds, as in the paper. Sizes 8, 64 and 256 and full fine-tuning are those of
# table 1.
glue --task $tasks --method houlsby top_k --r 2 4 16 32 128 512 \
    --top_k 1 2 3 5 7 9 11 12 18 24 --learning_rate 3e-5 3e-4 3e-3 --num_train_epochs 3 20 --seed 0 --predict \
    --output_dir runs/h1/sizes
after python recipes/studies/figure.py tradeoff runs/h1 --score accuracy --seeds best

# Figure 4
glue --task mnli cola --model_name $base \
    --method houlsby layer_norm top_k full --r 1 2 4 8 16 32 64 128 256 512 --top_k $(seq 12) \
    --learning_rate 3e-5 3e-4 3e-3 --num_train_epochs 3 20 --seed 0 1 2 --search_seeds 1 --output_dir runs/h4
after python recipes/studies/figure.py tradeoff runs/h4 --score accuracy --each

# Figure 5
sweep recipes/squad.py $squad_data --method houlsby --r 2 8 64 256 --learning_rate 3e-5 1e-4 3e-4 1e-3 \
    --num_train_epochs 3 10 20 --seed 0 1 2 --search_seeds 1 --output_dir runs/h5
sweep recipes/squad.py $squad_data --method top_k full --top_k 1 2 3 5 7 9 11 12 18 24 \
    --learning_rate 3e-5 5e-5 1e-4 --num_train_epochs 2 3 5 --seed 0 1 2 --search_seeds 1 --output_dir runs/h5
after python recipes/studies/figure.py tradeoff runs/h5

# Figure 6, left and center, by accuracy; the trained norms stay unless --norms remove is given
glue --task mnli cola --model_name $base --output_dir runs/h6
for run in runs/h6/*/*; do
    after python recipes/studies/figure.py ablation "$run"
done

# Figure 6, right
glue --task mnli cola --model_name $base --r 64 \
    --init_std 1e-7 1e-6 1e-5 1e-4 1e-3 1e-2 1e-1 1 --learning_rate 3e-5 3e-4 3e-3 --seed 0 1 2 \
    --output_dir runs/h6_init
after python recipes/studies/figure.py init_scale runs/h6_init

# Section 3.6: sizes 8, 64 and 256, from the runs of table 1; the mean over the tasks is printed beside the paper's
after python recipes/studies/figure.py init_scale runs/h1/table

# Section 3.6, the extensions without gain: (i) a norm in the bottleneck, (ii) a second hidden layer, (iii) other
# activations, (iv) adapters after the attention only, (v) parallel to both sub-layers, also with a gate
variant() {  # flags
    glue --task mnli cola --model_name $base --seed 0 1 2 "$@"
}
variant --extension norm deep --output_dir runs/h36/extensions
variant --activation gelu tanh relu swish --output_dir runs/h36/activations
variant --positions attention --output_dir runs/h36/attention_only
variant --kind parallel --positions attention feed_forward --output_dir runs/h36/parallel
variant --kind parallel --positions attention feed_forward --extension gated --output_dir runs/h36/parallel_gated
after python recipes/studies/figure.py compare runs/h36 --baseline "gelu, kind houlsby, r 64" --score accuracy
