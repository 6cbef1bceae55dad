#!/usr/bin/env bash
# Han, Pang and Wu 2021: every table and figure, with BERT-base from the Hub. See houlsby2019.sh on how to use it. The
# paper gives no hyperparameters of the pretraining except its steps; the others are those of mlm.py, on one device. It
# pretrains on masked words only, and names other objectives as future work.
source "$(dirname "${BASH_SOURCE[0]}")/common.bash"
# FLAGS stand first, so that a start from a checkpoint is not replaced by their --model_name.
sweep() { attempt python recipes/studies/sweep.py "$1" $glue_data ${FLAGS-} "${@:2}" ${DRY_RUN-}; }
# read_text TASK FLAGS: pretraining on the task's training text
read_text() {
    local text="--data nyu-mll/glue --data_config $1" validation
    if [ -n "${GLUE-}" ]; then
        validation=("$GLUE/$1"/validation*)  # of MNLI's two, the first is the matched one
        text="--data $(echo "$GLUE/$1"/train.*) --validation_file ${validation[0]}"
    fi
    after python recipes/mlm.py $text --max_length 256 --base_dtype float32 ${FLAGS-} "${@:2}"
}
adapter="--r 48 --activation swish --train_layer_norm false --init_std 0.02"

# pretrain TASK METHOD STEPS EVERY: checkpoints of pretraining on the task's training text, in
# runs/pretraining/TASK/METHOD. For the whole encoder, the learning rate of mlm.py would be too high.
pretrain() {
    local flags="$adapter"
    [ "$2" = houlsby ] || flags="--method $2 --learning_rate 5e-5"
    read_text "$1" $flags --max_steps "$3" --save_strategy steps --save_steps "$4" --save_total_limit 100 \
        --eval_strategy steps --eval_steps "$4" --load_best_model_at_end false --output_dir "runs/pretraining/$1/$2"
}

# starts TASK EVERY STEPS FOLDER FLAGS: fine-tuning with adapters and without, from the encoder and each checkpoint
starts() {
    local task=$1 every=$2 steps=$3 folder=$4 start
    shift 4
    run() { sweep recipes/studies/gradient_norms.py --task "$task" --preset han2021 --seed 0 "$@"; }
    run --method houlsby full "$@" --output_dir "$folder"
    for start in $(seq "$every" "$every" "$steps"); do
        run --method houlsby "$@" --init_adapter "runs/pretraining/$task/houlsby/checkpoint-$start" \
            --output_dir "$folder/pretrained_$start"
        run --method full "$@" --model_name "runs/pretraining/$task/full/checkpoint-$start" \
            --output_dir "$folder/pretrained_$start"
    done
    after python recipes/studies/figure.py stability "$folder"
}

# Table 1, with the second scores
sweep recipes/glue.py --task all --preset han2021 --method houlsby full --seed 0 \
    --output_dir runs/r1
for task in cola sst2 mrpc stsb qqp mnli qnli rte wnli; do
    read_text $task $adapter --max_steps 20000 --eval_strategy steps --eval_steps 2000 --save_strategy steps \
        --save_steps 2000 --load_best_model_at_end false --output_dir runs/$task-text
done
sweep recipes/glue.py --task all --preset han2021 --method houlsby --seed 0 \
    --init_adapter "runs/{task}-text/adapter" --output_dir runs/r1/pretrained
after python recipes/studies/study_table.py runs/r1

# Figures 2 and 3, and MNLI in appendix C. The best and the last epoch are shown apart.
sweep recipes/studies/gradient_norms.py --task rte --preset han2021 --method houlsby full \
    --seed $(seq 0 9) --output_dir runs/r2
after python recipes/studies/figure.py stability runs/r2
sweep recipes/studies/gradient_norms.py --task mnli --preset han2021 --method houlsby full \
    --seed 0 1 2 3 4 --output_dir runs/r_mnli
after python recipes/studies/figure.py stability runs/r_mnli
# The pooler's curve of figure 3 with adapters, which otherwise leave it frozen
sweep recipes/studies/gradient_norms.py --task rte --preset han2021 --method houlsby --train_pooler true \
    --seed $(seq 0 9) --output_dir runs/r3_pooler
after python recipes/studies/figure.py stability runs/r3_pooler

# Figures 1 and 4, and figures 9, 10 and 13, which start from the same checkpoints
pretrain cola houlsby 20000 2000
pretrain cola full 20000 2000
# The loss on masked words, which shows what has converged: the triangles of figure 1
after python recipes/studies/figure.py curves runs/pretraining/cola --x step
starts cola 2000 20000 runs/r4 --num_train_epochs 10
# One run of 100 epochs per start; figure 9 has 100 runs per start
starts cola 2000 20000 runs/r9 --num_train_epochs 100
starts cola 10000 20000 runs/r9_separate --num_train_epochs $(seq 100)

# Figure 5. An epoch of SST-2 has 2,105 steps of 32 texts; the paper does not list its numbers of epochs.
pretrain sst2 houlsby 21050 2105
pretrain sst2 full 21050 2105
starts sst2 2105 21050 runs/r5
after python recipes/studies/figure.py robustness runs/r5/sst2/* runs/r5/pretrained_*/sst2/* --max_eval_samples 872 \
    --output_dir runs/r5
