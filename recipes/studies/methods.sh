#!/usr/bin/env bash
# Adapters beside LoRA and others on five tasks of GLUE, each method with the same search; see houlsby2019.sh on how to
# use it. The rates are a third, one and three times the usual one: the best should not be at the edge of the three.
source "$(dirname "${BASH_SOURCE[0]}")/common.bash"
sweep() {
    attempt python recipes/studies/sweep.py recipes/glue.py $glue_data "$@" --seed 0 1 2 --search_seeds 1 \
        --model_name minilm --train_pooler true --warmup_steps 0.1 ${FLAGS-} ${DRY_RUN-}
}
method() {  # a name of a folder, and flags
    sweep --task cola --num_train_epochs 6 --output_dir runs/methods/"$@"
    sweep --task mrpc stsb rte --num_train_epochs 5 --output_dir runs/methods/"$@"
    sweep --task sst2 --num_train_epochs 3 --max_train_samples 10000 --output_dir runs/methods/"$@"
}
adapters="3e-4 1e-3 3e-3" few="1e-3 3e-3 1e-2"  # the fewer weights, the larger the rate

method full --method full --learning_rate 3e-5 1e-4 3e-4
method adapters --r 8 64 --learning_rate $adapters
method 3_shared --r 64 --share_layers 3 --learning_rate $adapters
method upper_half --r 64 --layers 3 4 5 --learning_rate $adapters
method pfeiffer --r 64 --kind pfeiffer --learning_rate $adapters
method parallel --r 64 --kind parallel --learning_rate $adapters
method lora_query_value --method lora --lora_r 8 --lora_targets query value --learning_rate $adapters
method lora_all --method lora --lora_r 8 --learning_rate $adapters --lora_targets query key value \
    attention.output.dense intermediate.dense output.dense
method others --method ia3 layer_norm linear --learning_rate $few
after python recipes/studies/figure.py compare runs/methods
