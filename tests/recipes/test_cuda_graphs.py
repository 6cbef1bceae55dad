"""Training steps as CUDA graphs."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
from peft import get_peft_model

import glue
from houlsby_peft import GraphedStep, HoulsbyConfig
from houlsby_peft.training import graphed_step
from recipe_runs import results_of, run
from run.edge import RecipeError
from run.training_arguments import RecipeTrainingArguments
from tiny_models import tiny_bert


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_without_graphs(dtype):
    """Batches of two shapes take turns, each with other inputs than the captured one."""
    base = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = get_peft_model(base.to("cuda", dtype), HoulsbyConfig(r=8)).train()
    expected_model = copy.deepcopy(model)

    def run(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    step = GraphedStep(lambda inputs: run(model, inputs), model.parameters())
    models = (model, expected_model)
    optimizers = [torch.optim.AdamW(trained.parameters(), 1e-2) for trained in models]
    generator = torch.Generator().manual_seed(0)
    for number in range(10):
        tokens = (5, 9)[number % 2]
        ids = torch.randint(1, 20, (3, tokens), generator=generator).cuda()
        mask = torch.ones_like(ids)
        mask[0, 3:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}
        loss, expected = step(inputs), run(expected_model, inputs)
        torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for weight, expected in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=0.1, atol=2e-2)


def test_a_step_may_take_inputs_out(monkeypatch):
    """As the Trainer takes out the labels, to smooth them. A graph is a computation here."""
    monkeypatch.setattr(graphed_step, "capture", lambda step, pool: (Mock(), step()))
    step = GraphedStep(lambda inputs: inputs.pop("labels").sum(), [])
    for _ in range(3):
        assert step({"labels": torch.ones(2)}) == 2


class ScheduleFree(torch.optim.AdamW):
    """As the optimizers of the package schedulefree, which refuse a step between `eval` and
    `train`.
    """

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def eval(self) -> None:
        self.is_training = False

    def step(self, closure=None):
        assert self.is_training
        return super().step(closure)


def test_a_schedule_free_optimizer_trains_between_evaluations(
    encoder, glue_data, tmp_path, monkeypatch
):
    """A graph is the step itself here."""
    monkeypatch.setattr("run.training_arguments.RecipeTrainingArguments._check_cuda_graphs", bool)
    monkeypatch.setattr("run.trainer.GraphedStep", lambda step, parameters: step)
    monkeypatch.setattr(torch.optim, "AdamW", ScheduleFree)
    run(glue, task="cola", model_name=encoder, data_dir=glue_data, output_dir=tmp_path,
        num_train_epochs=2, cuda_graphs=True)  # fmt: skip
    assert len(results_of(tmp_path)["epochs"]) == 2


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"gradient_accumulation_steps": 2}, "needs --gradient_accumulation_steps 1"),
        ({"adapter_drop": True}, "needs --adapter_drop False"),
        ({"use_cpu": True}, "an NVIDIA GPU"),
    ],
)
def test_what_a_graph_would_leave_out(tmp_path, flags, word):
    with pytest.raises(RecipeError, match=word):
        RecipeTrainingArguments(output_dir=str(tmp_path), cuda_graphs=True, **flags)
