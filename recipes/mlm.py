"""Train an adapter on a task's own text before it sees a label: masked language modeling (Han et al. 2021).

    accelerate launch recipes/mlm.py --data nyu-mll/glue --data_config rte --output_dir runs/rte-text
    accelerate launch recipes/glue.py --task rte --init_adapter runs/rte-text/adapter

The data are those of any other recipe, without their labels, or a .txt file with a text per line. The encoder is
frozen, and so is its head for masked words if the checkpoint has one. Otherwise, as with MiniLM, the output weights of
the head are tied to the input embeddings and the rest of it is trained; it is saved beside the adapter, not in it.
"""

import math
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, set_seed

from training.arguments import AdapterArguments, RecipeParser, RecipeTrainingArguments, TextArguments
from training.data import (
    check_columns,
    describe_data,
    find_text_columns,
    load_splits,
    rows_with_text,
    sample,
    tokenize,
    with_validation,
)
from training.errors import RecipeError, end_with_one_line
from training.model import add_adapter, load_model
from training.runs import Run, plan_push
from training.trainer import RecipeTrainer


HEAD_FILE = "mlm_head.safetensors"


def main() -> None:
    """Read the command line, train, keep the epoch with the lowest loss, save the adapter and results.json."""
    groups = (TextArguments, AdapterArguments, RecipeTrainingArguments)
    arguments, adapter, training = RecipeParser(groups, usage="accelerate launch recipes/mlm.py [flags]").parse()
    config = adapter.config()
    if training.label_smoothing_factor:
        raise RecipeError("--label_smoothing_factor has no effect on masked words. Leave it out.")
    training.output_dir = training.output_dir.replace("{task}", "mlm")
    training.choose_by(["loss"])
    training.prediction_loss_only = True  # logits of a whole vocabulary per token would be too much to keep
    push = plan_push(training, arguments.model_name)
    run = Run(training, arguments, adapter)
    if run.results is not None:
        return push(training.output_dir)

    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    with training.main_process_first():
        splits = load_splits(arguments.data, arguments.data_config)
    splits = with_validation({name: texts(split, name, arguments) for name, split in splits.items()})
    splits["train"] = sample(splits["train"], arguments.max_train_samples)
    model, tokenizer, missing = load_model(AutoModelForMaskedLM, arguments.model_name)
    if tokenizer.mask_token is None:
        raise RecipeError(f"Masked language modeling needs a mask token; {arguments.model_name} has none.")
    # "all" norms are those of the encoder: the models of other recipes would lack a norm of this head.
    config.exclude_modules = rf"(?!{model.base_model_prefix}\.).*"
    model = add_adapter(model, config, adapter.init_adapter)
    head = train_missing_head(model, missing)
    if training.should_log:
        print(f"{len(splits['train']):,} training texts; encoder {arguments.model_name}")
        print(describe(head))

    data = {
        name: tokenize(
            splits[name], tokenizer, (columns := splits[name].column_names), arguments.max_length
        ).remove_columns(columns)
        for name in ("train", "validation")
    }
    trainer = MlmTrainer(
        head,
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(run.checkpoint)
    trainer.save_trained()
    results = run.finish(
        trainer,
        task="mlm",
        model=arguments.model_name,
        dataset=describe_data(Path(arguments.data).stem, arguments.data, arguments.data_config, splits),
        loss_before=before,
        trained_head=sorted(head),
    )
    after = results["best_scores"].get("loss")
    if training.should_log and after is not None:
        print(f"validation perplexity of masked tokens: {math.exp(before):,.1f} before, {math.exp(after):,.1f} after")
    push(training.output_dir)


def train_missing_head(model: PeftModel, missing: set[str]) -> dict[str, nn.Parameter]:
    """Make the weights trainable that the checkpoint lacks, and return them by name.

    The output weights are never among them: they are tied to the input embeddings, which every checkpoint has.
    """
    weights = {name: weight for name, weight in model.get_base_model().named_parameters() if name in missing}
    for weight in weights.values():
        weight.requires_grad = True
    return weights


def describe(head: dict[str, nn.Parameter]) -> str:
    """Return what becomes of the head, for the log."""
    if not head:
        return "head for masked words: the checkpoint's, frozen"
    size = sum(weight.numel() for weight in head.values())
    return (
        f"head for masked words: not in the checkpoint; tied to the embeddings, its other {size:,} weights are trained"
    )


def texts(data: Dataset, name: str, arguments: TextArguments) -> Dataset:
    """Return the rows of a split that hold text, and only the columns of the texts."""
    columns = find_text_columns(data, arguments.text_columns)
    check_columns(data, name, columns, label_columns=())
    return data.select(rows_with_text(data, name, columns)).select_columns(list(columns))


class MlmTrainer(RecipeTrainer):
    """A trainer that computes logits only for masked tokens, and saves the trained head with its checkpoints.

    Args:
        head: The trained weights of the head, by name; saved in a file beside the adapter's.
        kwargs: As for a Trainer.
    """

    def __init__(self, head: dict[str, nn.Parameter], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head = head

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean cross-entropy of the masked tokens; 0 if a batch has none.

        The head costs as much as all of the encoder's layers, and six of seven tokens are not masked.
        """
        labels = inputs.pop("labels")
        masked = labels != -100

        def select(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state[masked].unsqueeze(0)
            return output

        with self.model.get_base_model().base_model.register_forward_hook(select):
            outputs = model(**inputs)
        loss = cross_entropy(outputs.logits[0].float(), labels[masked], reduction="sum") / max(1, int(masked.sum()))
        return (loss, outputs) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.head and self.args.should_save:
            save_file({name: weight.detach() for name, weight in self.head.items()}, self._file(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_head(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_head(self.state.best_model_checkpoint)

    def _load_head(self, folder: str) -> None:
        if self.head:
            for name, value in load_file(self._file(folder)).items():
                self.head[name].data.copy_(value)

    def _file(self, folder: str | None) -> Path:
        return Path(folder or self.args.output_dir, HEAD_FILE)


if __name__ == "__main__":
    end_with_one_line(main)
