"""The papers' presets on GLUE: every number that the papers give, and the batch, whatever it is split over."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import glue
from distributed_runs import ENVIRONMENT
from houlsby_peft import HoulsbyConfig
from study.presets import NAMES, parse_arguments, preset
from tiny_models import tiny_bert
from training.arguments import AdapterArguments, RecipeParser, RecipeTrainingArguments, TextArguments
from training.errors import RecipeError
from training.methods import ClassifierMethodArguments, MethodArguments, apply_method
from training.trainer import RecipeTrainer


DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"


def parsed(*flags):
    """All arguments that the command line gives, in one."""
    with patch.object(sys, "argv", ["glue.py", "--output_dir", "runs", *map(str, flags)]):
        return {name: value for group in parse_arguments() for name, value in vars(group).items()}


# What the papers and their code say, and nothing else.
PAPERS = {
    "houlsby2019": {
        "model_name": "google-bert/bert-large-uncased", "r": 64, "init_std": 1e-2, "train_layer_norm": "all",
        "learning_rate": 3e-4, "num_train_epochs": 20, "per_device_train_batch_size": 32, "warmup_steps": 0.1,
        "weight_decay": 0.01, "adam_epsilon": 1e-6, "max_grad_norm": 1.0, "head": "linear", "max_length": 128,
    },
    "mohebbi2020": {
        "model_name": "google-bert/bert-base-uncased", "r": 64, "activation": "gelu", "init_std": 1e-3,
        "train_layer_norm": "true", "head": "two_layer", "learning_rate": 3e-4, "num_train_epochs": 10,
        "per_device_train_batch_size": 32, "warmup_steps": 0.1,
    },
    "uva2019": {
        "model_name": "google-bert/bert-base-uncased", "r": 64, "activation": "gelu", "init_std": 1e-3,
        "learning_rate": 2e-5, "num_train_epochs": 15, "max_length": 128, "weight_decay": 0.01,
        "adam_epsilon": 1e-6, "max_grad_norm": 1.0,
    },
    "han2021": {
        "model_name": "google-bert/bert-base-uncased", "r": 48, "activation": "swish", "train_layer_norm": "false",
        "learning_rate": 1e-4, "num_train_epochs": 20, "max_length": 256, "per_device_train_batch_size": 32,
    },
}  # fmt: skip


class TestPresets:
    @pytest.mark.parametrize("name", NAMES)
    def test_the_papers_numbers(self, name):
        found = parsed("--task", "cola", "--preset", name)
        assert {key: found[key] for key in PAPERS[name]} == PAPERS[name]
        assert found["lr_scheduler_type"] == "linear"

    @pytest.mark.parametrize("name", NAMES)
    def test_every_name_is_an_argument(self, name):
        groups = (
            glue.GlueArguments,
            ClassifierMethodArguments,
            glue.ClassifierArguments,
            glue.RecipeTrainingArguments,
        )
        known = {field.name for group in groups for field in fields(group)}
        for method in ("houlsby", "full", "lora"):
            assert preset(name, method, 3).keys() <= known

    def test_flags_overrule(self):
        found = parsed("--task", "cola", "--preset", "houlsby2019", "--learning_rate", 3e-3, "--r", 8)
        assert (found["learning_rate"], found["r"], found["num_train_epochs"]) == (3e-3, 8, 20)

    def test_of_a_variant(self):
        shared = parsed("--task", "cola", "--preset", "mohebbi2020", "--share_layers", 3)
        assert (shared["train_layer_norm"], shared["head"]) == ("false", "linear")
        tuned = parsed("--task", "cola", "--preset", "han2021", "--method", "full")
        assert (tuned["learning_rate"], tuned["num_train_epochs"], tuned["max_length"]) == (2e-5, 10, 128)
        assert parsed("--task", "cola", "--preset", "mohebbi2020", "--method", "full")["head"] == "linear"

    @pytest.mark.parametrize("method", ["full", "top_k"])
    @pytest.mark.parametrize(
        ("name", "rate", "epochs"),
        [
            ("houlsby2019", 3e-5, 3),  # not given by the paper, nor is the next
            ("mohebbi2020", 3e-5, 3),
            ("uva2019", 2e-5, 15),
            ("han2021", 2e-5, 10),
        ],
    )
    def test_fine_tuning_has_no_settings_of_adapters(self, name, method, rate, epochs):
        layers = ["--top_k", "3"] if method == "top_k" else []
        tuned = parsed("--task", "cola", "--preset", name, "--method", method, *layers)
        assert (tuned["learning_rate"], tuned["num_train_epochs"]) == (rate, epochs)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("method", ["lora", "layer_norm", "linear"])
    def test_other_methods_have_the_settings_of_adapters(self, name, method):
        found = parsed("--task", "cola", "--preset", name, "--method", method)
        expected = PAPERS[name] | {"head": "linear"}
        assert {key: found[key] for key in expected} == expected

    def test_the_documented_pretraining_is_of_the_presets_adapter(self):
        """An adapter of other options could not be started from."""
        blocks = re.findall(r"```bash\n(.*?)```", DOCS.read_text().replace("\\\n", ""), re.DOTALL)
        [block] = [block for block in blocks if "--preset han2021 --init_adapter" in block]
        [pretraining] = re.findall(r"recipes/(mlm.py .*)", block)
        with patch.object(sys, "argv", shlex.split(pretraining)):
            groups = (TextArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments)
            text, method, adapter, training = RecipeParser(groups).parse()
        found = {**vars(text), **vars(adapter)}
        run = parsed("--task", "cola", "--preset", "han2021")
        options = {"model_name", "max_length", *vars(adapter)}
        assert {name: found[name] for name in options} == {name: run[name] for name in options}
        assert method.base_dtype == run["base_dtype"] == "float32"
        assert training.max_steps == 20_000

    def test_norms_and_biases_do_not_decay(self, tmp_path):
        """As in the code of Houlsby et al."""
        model = apply_method(tiny_bert(), MethodArguments(), HoulsbyConfig(modules_to_save=["pooler"]))
        arguments = glue.RecipeTrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, eval_strategy="no", load_best_model_at_end=False, weight_decay=0.01
        )
        trainer = RecipeTrainer(model, arguments)
        groups = trainer.create_optimizer().param_groups
        decayed = {id(weight) for group in groups if group["weight_decay"] for weight in group["params"]}
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        assert {name for name, weight in trained.items() if id(weight) in decayed} == {
            name for name, weight in trained.items() if weight.ndim == 2
        }
        assert {weight.ndim for weight in trained.values()} == {1, 2}

    def test_the_parameters_that_uva_prints(self):
        """The flags of docs/recipes.md, and the head, which is trained in a copy unless modules_to_save is []."""
        with patch.object(
            sys, "argv", ["glue.py", "--task", "mrpc", "--preset", "uva2019", "--train_layer_norm", "false"]
        ):
            config = parse_arguments()[2].config()
        for modules_to_save, head in ((None, 1_538), ([], 0)):
            with torch.device("meta"):
                bert = BertForSequenceClassification(BertConfig())
                model = get_peft_model(bert, replace(config, modules_to_save=modules_to_save, init_weights=False))
            assert model.get_nb_trainable_parameters() == (2_379_264 + head, 111_863_042 + head)


class TestBatch:
    @pytest.mark.parametrize(
        ("flags", "size"),
        [
            ([], 32),
            (["--gradient_accumulation_steps", 4], 8),
            (["--per_device_train_batch_size", 32, "--gradient_accumulation_steps", 4], 32),
            (["--per_device_train_batch_size", 5, "--gradient_accumulation_steps", 3], 5),
        ],
    )
    def test_accumulated_steps(self, flags, size):
        assert parsed("--task", "cola", "--preset", "han2021", *flags)["per_device_train_batch_size"] == size

    @pytest.mark.parametrize("steps", [3, 64])
    def test_steps_that_do_not_divide_it(self, steps):
        with pytest.raises(RecipeError, match=rf"batch of 32, .* over 1 devices times {steps} accumulated steps"):
            parsed("--task", "cola", "--preset", "han2021", "--gradient_accumulation_steps", steps)

    def test_two_processes(self, tmp_path):
        """Each is asked for its batch with several flags, in one launch."""
        asked = [[], ["--gradient_accumulation_steps", "2"], ["--per_device_train_batch_size", "32"]]
        (tmp_path / "process.py").write_text(PROCESS)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
             str(tmp_path / "process.py"), json.dumps(asked), str(tmp_path)],
            env={**os.environ, **ENVIRONMENT}, cwd=tmp_path, text=True, capture_output=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for rank in "01":
            assert json.loads((tmp_path / rank).read_text()) == [2, 16, 8, 32]


PROCESS = f"""
import json
import sys
from pathlib import Path

sys.path.insert(0, {str(Path(__file__).parents[2] / "recipes")!r})
from study.presets import parse_arguments

asked, folder = json.loads(sys.argv[1]), sys.argv[2]
found = []
for flags in asked:
    sys.argv = ["glue.py", "--task", "cola", "--preset", "houlsby2019", "--use_cpu", *flags]
    training = parse_arguments()[-1]
    found.append(training.per_device_train_batch_size)
Path(folder, str(training.process_index)).write_text(json.dumps([training.world_size, *found]))
"""
