"""What people get wrong on the recipes' command lines: all is refused in one line, before anything is loaded."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainingArguments

from study.presets import parse_arguments
from training.errors import RecipeError, end_with_one_line
from training.rules import FLAGS_OF_EXAMPLES, NOT_FLAGS, RULES


RECIPES = Path(__file__).parents[2] / "recipes"
# What every training recipe needs; {csv} is a file that a classifier could be trained on.
TRAINING = {
    "glue": ["--task", "cola", "--data_dir", "{glue}"],
    "text_classification": ["--data", "{csv}"],
    "token_classification": ["--data", "{csv}"],
    "squad": ["--data", "{csv}"],
    "mlm": ["--data", "{csv}"],
    "stream": ["--data", "{csv}"],
    "paper_tasks": ["--data", "{glue}", "--tasks", "sms_spam"],
}
# Flags of all training recipes, with values that nobody can mean.
NONSENSE = [
    *("--max_train_samples -5", "--max_train_samples 0", "--max_train_samples 1.5", "--max_length 0"),
    *("--max_length -1", "--max_length 2", "--num_train_epochs 0", "--num_train_epochs nan", "--num_train_epochs inf"),
    *("--num_train_epochs -1", "--max_steps 0", "--max_steps -2", "--learning_rate 0", "--learning_rate=-1e-3"),
    *("--learning_rate nan", "--learning_rate inf", "--learning_rate fast", "--label_smoothing_factor 2"),
    *("--label_smoothing_factor -0.1", "--max_grad_norm -1", "--max_grad_norm nan", "--per_device_train_batch_size 0"),
    *("--per_device_train_batch_size -8", "--per_device_eval_batch_size 0", "--gradient_accumulation_steps 0"),
    *("--warmup_steps -1", "--warmup_steps nan", "--weight_decay -1", "--weight_decay nan", "--seed -1"),
    *("--seed 4294967296", "--seed one", "--data_seed -1", "--adam_beta1 1", "--adam_beta2 2", "--adam_epsilon 0"),
    *("--adam_epsilon -1", "--logging_steps 0", "--logging_steps -1", "--eval_steps 0", "--save_steps -3"),
    *("--save_total_limit 0", "--early_stopping_patience 0", "--early_stopping_patience -1", "--eval_delay -1"),
    *("--dataloader_num_workers -1", "--dataloader_prefetch_factor 2", "--ddp_timeout 0", "--neftune_noise_alpha -1"),
    *("--r 0", "--r -8", "--r nan", "--share_layers -1", "--dropout 1", "--dropout -0.1", "--dropout nan"),
    *("--init_std -1", "--init_std nan", "--init_std inf", "--layers -1", "--layers 1 1", "--activation softmux"),
    *("--train_layer_norm maybe", "--report_to wandb_of_mine", "--report_to comet_ml"),
    "--save_steps 10 --eval_steps 5 --eval_strategy steps --save_strategy steps",
    "--save_steps 500 --eval_strategy steps --save_strategy steps",
    *("--save_strategy steps", "--eval_strategy no --early_stopping_patience 2 --load_best_model_at_end false"),
    *("--lr_scheduler_type cosine_with_min_lr", "--lr_scheduler_kwargs [1]", "--lr_scheduler_kwargs 3"),
    *("--lr_scheduler_type lineal", "--optim adamw_bnb_8bit", "--optim adam", "--fp16 --use_cpu", "--bf16 --fp16"),
    *("--deepspeed absent.json", "--resume_from_checkpoint absent/checkpoint-5", "--output_dir {csv}/run"),
    *("--resume_from_checkpoint last --overwrite_output_dir", "--init_adapter ./absent", "--eval_on_start maybe"),
    *(f"--{name}" for name in (*NOT_FLAGS, *FLAGS_OF_EXAMPLES)),
    *("--no_such_flag 3", "--metric_for_best_model", "--model_name"),
]
BLANK = ("output_dir", "model_name", "metric_for_best_model", "resume_from_checkpoint", "init_adapter", "activation")
# Command lines of single scripts.
OWN = [
    ("glue", "--task mrcp"), ("glue", "--task"), ("glue", "--data_dir {glue}"),
    ("glue", "--task mnli --data_dir {glue}"),
    ("glue", "--task cola --data_dir absent"), ("glue", "--task cola --data_dir {csv}"), ("glue", "--predict"),
    ("glue", "--task cola --metric_for_best_model f1"), ("glue", "--task cola --metric_for_best_model runtime"),
    ("glue", "--method adapters"), ("glue", "--method top_k"), ("glue", "--top_k 2"),
    ("glue", "--method top_k --top_k 0"), ("glue", "--method full --head two_layer"),
    ("glue", "--method full --base_dtype bfloat16"), ("glue", "--method lora --lora_r 0"),
    ("glue", "--method lora --lora_alpha -1"), ("glue", "--keep_prefix memory"),
    ("glue", "--keep_prefix memory --layers 0 1"), ("glue", "--keep_prefix memory --layers 1 --keep_prefix_gb -1"),
    ("glue", "--keep_prefix memory --layers 1 --method lora"), ("glue", "--preset houlsby2091"),
    ("glue", "--task stsb --data_dir {glue} --label_smoothing_factor 0.1"), ("glue", "--evaluate ./absent"),
    ("glue", "--evaluate {glue} --max_train_samples 5"), ("glue", "--evaluate {glue} --overwrite_output_dir"),
    ("glue", "--evaluate {glue} --push_to_hub"), ("glue", "--evaluate {glue} --example a b"),
    ("glue", "--evaluate {glue} --max_length -3"),
    ("glue", "--evaluate {glue} --per_device_eval_batch_size 0"),
    ("glue", "--evaluate {glue} --metric_for_best_model f"),
    ("glue", "--evaluate {glue} --task mrcp"), ("glue", "--preset uva2019 --gradient_accumulation_steps 5"),
    ("text_classification", ""), ("text_classification", "--data absent.csv"),
    ("text_classification", "--data ./absent"), ("text_classification", "--data {csv} --text_columns a b c"),
    ("text_classification", "--data {csv} --text_columns text text"),
    ("text_classification", "--data {csv} --text_columns absent"),
    ("text_classification", "--data {csv} --text_columns label"),
    ("text_classification", "--data {csv} --label_columns absent"),
    ("text_classification", "--data {csv} --label_columns text"),
    ("text_classification", "--data {csv} --problem_type classes"),
    ("text_classification", "--data {csv} --problem_type regression"),
    ("text_classification", "--data {csv} --metric_for_best_model f1"),
    ("text_classification", "--data {csv} --class_weights inverse"),
    ("text_classification", "--data {scores} --class_weights balanced"),
    ("text_classification", "--data {csv} --do_eval"),
    ("text_classification", "--data {csv} --validation_file no.csv"),
    ("text_classification", "--data {csv} --do_train --early_stopping_patience 2"),
    ("text_classification", "--data {csv} --evaluate {glue} --push_to_hub"),
    ("text_classification", "absent.json"), ("text_classification", "{csv} --r 8"),
    ("text_classification", "{flags}"), ("text_classification", "{flags} --data {csv}"),
    ("token_classification", "--data absent.conll"), ("token_classification", "--data {csv} --word_column absent"),
    ("token_classification", "--data {csv} --tag_column absent"),
    ("squad", "--data {csv} --stride -1"), ("squad", "--data {csv} --n_best 0"), ("squad", "--data absent/x/y"),
    ("squad", "--data {csv} --max_answer_length 0"), ("squad", "--data {csv} --null_threshold nan"),
    ("squad", "--data {csv} --max_eval_samples 0"), ("squad", "--data {csv} --stride 380"),
    ("squad", "--data {csv} --max_length 100"), ("squad", "--data {csv} --do_eval"),
    ("squad", "--data {csv} --label_smoothing_factor 0.1"), ("squad", "--data {csv} --example Who?"),
    ("mlm", "--data {csv} --label_smoothing_factor 0.1"), ("mlm", "--data {csv} --do_eval"),
    ("mlm", "--data {csv} --metric_for_best_model accuracy"), ("mlm", "--data {csv} --example text"),
    ("mlm", "--data {csv} --text_columns absent"), ("stream", "--data {csv} {csv}"),
    ("stream", "--data {csv} absent.csv"), ("stream", "--data {csv} --save_strategy epoch"),
    ("stream", "--data {csv} --resume_from_checkpoint last"), ("stream", "--data {csv} --do_train"),
    ("paper_tasks", "--data {glue} --tasks spam"),
    ("paper_tasks", "--data {glue}"), ("paper_tasks", "--data {glue} --tasks sms_spam --do_train --do_eval"),
    ("paper_tasks", "--data {glue} --tasks sms_spam sms_spam"),
    ("paper_tasks", "--data {glue} --tasks sms_spam"),
    ("submission", "absent.zip"), ("submission", "{csv}"), ("submission", "a.zip absent.tsv"),
    ("submission", "a.zip {csv}"), ("submission", "absent/a.zip"), ("submission", ""),
    ("study_table", "absent"), ("study_table", "{glue}"), ("study_table", "{csv}"), ("study_table", ""),
    ("study_table", "{run} --choose loss"), ("study_table", "{run} --choose r r"), ("study_table", "{broken}"),
    ("ablation", "--run absent"), ("ablation", "--batch_size 0"), ("ablation", "--prune 2"),
    ("ablation", "--prune nan"), ("ablation", "--max_eval_samples 0"), ("ablation", "--score f1"),
    ("ablation", "--run {broken}"), ("ablation", "--data_dir absent"),
    ("robustness", "--run absent"), ("robustness", "--run {run} {run}"), ("robustness", "--run {run} --name a b"),
    ("robustness", "--batch_size -1"), ("robustness", "--max_eval_samples 0"), ("robustness", "--wordnet absent"),
    ("tradeoff", "--seed 0 0"), ("tradeoff", "--seed 0 00"), ("tradeoff", "--seed -1"), ("tradeoff", "--seed x"),
    ("tradeoff", "--r 0"), ("tradeoff", "--r 8 8.0"), ("tradeoff", "--learning_rate 1e-3 0.001"),
    ("tradeoff", "--method adapters"), ("tradeoff", "--method houlsby houlsby"), ("tradeoff", "--jobs 0"),
    ("tradeoff", "--recipe absent.py"), ("squad", "--method full --init_adapter {run}"),
    ("tradeoff", "--task mrcp"), ("tradeoff", "--max_length 0"), ("tradeoff", "--num_train_epochs 0"),
    ("tradeoff", "--output_dir {csv}/x"), ("tradeoff", "--draw_only --output_dir {glue}"),
    ("tradeoff", "--no_such_flag 1"), ("tradeoff", "--task all --data_dir {glue}"),
    ("init_scale", "--init_std nan"), ("init_scale", "--init_std 1e-2 0.01"), ("init_scale", "--init_std -1"),
    ("init_scale", "--score f1"), ("init_scale", "--task stsb"), ("init_scale", "--task all"),
    ("init_scale", "--learning_rate 0"), ("init_scale", "--r 1.5"),
    ("extensions", "--variant layer_norm"), ("extensions", "--variant paper paper"), ("extensions", "--variant none"),
    ("extensions", "--task cola --data_dir {glue} --max_train_samples 0"),
    ("stability", "--learning_rate nan"), ("stability", "--full_learning_rate -1"),
    ("stability", "--pretraining_steps 0"), ("stability", "--pretraining_steps 10 10"),
    ("stability", "--pretraining_steps many"), ("stability", "--seed 1 1"), ("stability", "--data_dir absent"),
    ("stability", "--task cola cola"), ("stability", "--pretraining_learning_rate 0"),
    ("stability", "--full_pretraining_learning_rate nan"), ("stability", "--pretraining_seed -1"),
    ("stability", "--pretraining_precision double"), ("stability", "--num_train_epochs 0"),
    ("init_scale", "--num_train_epochs 3 3"), ("learning_curves", "absent"), ("no_bert", "--data {glue}/absent"),
    ("time_to_score", "absent"), ("time_to_score", "{glue} --share 0"),
    ("variants", "--variant none"), ("variants", ""),
    ("variants", "--variant layer_norm --max_length 0"), ("gradient_norms", "absent.py"),
    ("gradient_norms", "--learning_rate 0"),
]  # fmt: skip


def loaded(*_: object, **__: object) -> None:
    raise AssertionError("a model was loaded, or a run was started, before the mistake was found")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "data.csv").write_text("text,label\n" + "a good one,yes\na bad one,no\n" * 20)
    (folder / "scores.csv").write_text("text,label\n" + "a good one,1.5\na bad one,2\n" * 20)
    (folder / "flags.json").write_text('{"r": 8, "no_such_flag": 3}')
    for name in ("cola", "stsb", "sms_spam"):
        (folder / "glue" / name).mkdir(parents=True)
    for name, results in (("run", {"task": "cola"}), ("broken", None)):
        (folder / name).mkdir()
        (folder / name / "results.json").write_text("{" if results is None else json.dumps(results))
    csvs = {"csv": folder / "data.csv", "scores": folder / "scores.csv", "flags": folder / "flags.json"}
    return {**csvs, **{name: folder / name for name in ("glue", "run", "broken")}}


def launch(script, flags, folder):
    """Runs a script as from the command line; returns what it prints on stderr, and its exit status."""
    with (
        patch.object(sys, "argv", [str(RECIPES / f"{script}.py"), *flags]),
        patch("training.model.AutoConfig.from_pretrained", loaded),
        patch("analysis.grid.Sweep", loaded),
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.chdir(folder)
        # The scripts that are commands themselves run another one in __main__, whose own last line this is.
        try:
            end_with_one_line(importlib.import_module(script).main)
        except SystemExit as end:
            return end.code
    return 0


def check_refused(script, command, files, folder, capsys):
    flags = [word.format(**files) for word in command.split()]
    code = launch(script, flags, folder)
    output = capsys.readouterr()
    message = code if isinstance(code, str) else output.err.strip()
    assert code != 0, f"accepted: {script} {command}"
    assert message.startswith("error: "), message
    assert "\n" not in message or script == "submission", message
    assert len(message) > 30
    # Some flags are checked with the data, when the folder of the run is there; no file of a run is.
    assert {path.name for path in folder.rglob("*") if path.is_file()} <= {"arguments.json", "run.lock"}
    return message


@pytest.mark.parametrize("command", NONSENSE)
def test_nonsense_is_refused(command, files, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed")
    message = check_refused("glue", f"--task cola --data_dir {{glue}} {command}", files, tmp_path, capsys)
    flag = command.replace("=", " ").split()[0]
    if flag.removeprefix("--") in (*RULES, *NOT_FLAGS, *FLAGS_OF_EXAMPLES):
        assert flag in message


@pytest.mark.parametrize("flag", BLANK)
def test_blanks_are_refused(flag):
    for blank in ("", "  "):
        with pytest.raises(RecipeError, match=f"--{flag} must be .*, got '"):
            parse_arguments([f"--{flag}", blank])


@pytest.mark.parametrize(("script", "command"), OWN, ids=lambda value: value or "nothing")
def test_mistakes_of_single_scripts_are_refused(script, command, files, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed")
    check_refused(script, command, files, tmp_path, capsys)


@pytest.mark.parametrize("script", TRAINING)
def test_every_recipe_obeys_the_same_rules(script, files, tmp_path, capsys):
    for command in (
        "--max_length 0",
        "--learning_rate nan",
        "--seed -1",
        "--label_names x",
        "--r 0",
        "--report_to mine",
    ):
        check_refused(script, " ".join([*TRAINING[script], command]), files, tmp_path, capsys)


def test_every_script_has_mistakes_here():
    scripts = {path.stem for path in RECIPES.glob("*.py") if path.stem != "sweep"}
    assert scripts == {script for script, _ in OWN}


# Where a number may be, as an interval that includes its ends only if told so: independent of the table of rules.
POSITIVE, SHARE, ANY = (0, math.inf, False), (0, 1, True), (0, math.inf, True)
FLOATS = {
    "learning_rate": POSITIVE, "num_train_epochs": POSITIVE, "adam_epsilon": POSITIVE, "weight_decay": ANY,
    "max_grad_norm": ANY, "warmup_steps": ANY, "label_smoothing_factor": SHARE, "adam_beta1": SHARE,
    "adam_beta2": SHARE, "dropout": SHARE, "init_std": (0, 1e6, True), "keep_prefix_gb": POSITIVE, "eval_delay": ANY,
}  # fmt: skip
INTEGERS = {
    "max_train_samples": 1, "max_length": 3, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1, "seed": 0, "save_total_limit": 1, "early_stopping_patience": 1, "lora_r": 1,
    "lora_alpha": 1, "r": 1, "share_layers": 0, "dataloader_num_workers": 0,
}  # fmt: skip


def is_accepted(flag: str, value: object) -> bool:
    try:
        parse_arguments([f"--{flag}={value}"])
    except RecipeError as error:
        message = str(error)
    else:
        return True
    assert f"--{flag}" in message
    assert "\n" not in message
    return False


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FLOATS)), st.floats())
def test_floats_are_accepted_exactly_where_they_make_sense(flag, value):
    least, most, least_included = FLOATS[flag]
    assert is_accepted(flag, value) == (least < value < most or (least_included and value == least))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(INTEGERS)), st.integers(-(2**31), 2**31))
def test_whole_numbers_are_accepted_exactly_where_they_make_sense(flag, value):
    assert is_accepted(flag, value) == (value >= INTEGERS[flag])


def test_the_rules_name_flags_that_exist():
    """A flag under a new name would lose its rule."""
    source = "".join(path.read_text() for path in RECIPES.rglob("*.py") if path.name != "rules.py")
    known = {field.name for field in fields(TrainingArguments)}
    for name in (*RULES, *NOT_FLAGS):
        assert name in known or f"    {name}: " in source or f'"--{name}"' in source or f'"{name}"' in source, name
