"""Train an adapter, or the whole model, on a task's own text before it sees a label: masked language modeling.

    accelerate launch recipes/mlm.py --data nyu-mll/glue --data_config rte --output_dir runs/rte-text
    accelerate launch recipes/glue.py --task rte --init_adapter runs/rte-text/adapter
    accelerate launch recipes/mlm.py --data nyu-mll/glue --data_config rte --method full --learning_rate 2e-5 \
        --output_dir runs/rte-text-full
    accelerate launch recipes/glue.py --task rte --method full --model_name runs/rte-text-full/model

The first two commands are the method of Han et al. 2021, the last two their baseline without adapters. The data are
those of any other recipe, without their labels, or a .txt file with a text per line. An adapter leaves the encoder
frozen, and also the head for masked words if the checkpoint has one. Otherwise, as with MiniLM, the output weights of
the head are tied to the input embeddings and the rest of it is trained; it is saved beside the adapter, not in it.
--method full trains all of it. A whole model is saved with the pooler of the checkpoint, which masked words do not
need, so that a classifier starts with it.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from common.arguments import (
    AUTO,
    OFF,
    POOLER,
    AdapterArguments,
    MethodArguments,
    RecipeParser,
    RecipeTrainingArguments,
    TextArguments,
)
from common.data import (
    check_columns,
    describe_data,
    find_text_columns,
    rows_with_text,
    sample,
    tokenize,
    with_validation,
)
from common.edge import RecipeError, end_with_one_line, log
from common.model import apply_method, find_model, load_model, load_saved, settle
from common.run import Run, find_evaluated, plan_push, write_evaluation
from common.scores import without_times
from common.task import files_of, load_data, split_to_score
from common.trainer import RecipeTrainer


HEAD_FILE = "mlm_head.safetensors"


def main() -> None:
    """Read the command line, train, keep the epoch with the lowest loss, save the trained weights and results.json."""
    groups = (TextArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/mlm.py [flags]")
    arguments, method, adapter, training = parser.parse()
    without_effect = {
        "--keep_prefix": method.keep_prefix not in (AUTO, OFF),  # each epoch masks other words
        "--label_smoothing_factor": training.label_smoothing_factor,
        "--example": training.example,  # an adapter for masked words predicts nothing
    }
    if given := [flag for flag, value in without_effect.items() if value]:
        raise RecipeError(f"{given[0]} has no effect on masked words. Leave it out.")
    method.keep_prefix = OFF
    training.output_dir = training.output_dir.replace("{task}", "mlm")
    training.choose_by(["loss"])
    training.prediction_loss_only = True  # logits of a whole vocabulary per token would be too much to keep
    name = find_evaluated(arguments, adapter, training)
    if name is not None:
        return evaluate(name, arguments, method, training)
    if method.base_dtype == AUTO and not has_head(arguments.model_name):
        method.base_dtype = "float32"  # a new head would train, tied to frozen embeddings
    method = settle(method, adapter, training, arguments.model_name)
    push = plan_push(training, arguments.model_name)
    run = Run(training, arguments, method, adapter, files=files_of(arguments))
    if run.results is not None:
        return push(training.output_dir)

    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    splits = {name: texts(split, name, arguments) for name, split in load_data(arguments, training).items()}
    if training.do_eval:
        splits = with_validation(splits)
    splits["train"] = sample(splits["train"], arguments.max_train_samples)
    model, tokenizer, missing = load_model(AutoModelForMaskedLM, arguments.model_name, method.base_dtype)
    if tokenizer.mask_token is None:
        raise RecipeError(f"Masked language modeling needs a mask token; {arguments.model_name} has none.")
    # "all" norms are those of the encoder: the models of other recipes would lack a norm of this head.
    config = adapter.config(exclude_modules=rf"(?!{model.base_model_prefix}\.).*")
    model = apply_method(model, method, config, adapter.init_adapter)
    head = train_missing_head(model, missing)
    if method.base_dtype != "float32" and head:
        raise RecipeError(
            f"--base_dtype {method.base_dtype} needs a checkpoint with a head for masked words, whose weights are "
            f"frozen; {arguments.model_name} has none. Leave it out, or give --bf16."
        )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise RecipeError(
            f"--method {method.method} trains only the head for masked words where the checkpoint has none; "
            f"{arguments.model_name} has one. Give another --method."
        )
    if not isinstance(model, PeftModel):
        keep_pooler(model)
    log(f"{len(splits['train']):,} training texts; encoder {arguments.model_name}")
    log(describe(head, method))

    trainer = make_trainer(head, model, tokenizer, splits, arguments.max_length, training)
    before = trainer.evaluate()["eval_loss"] if training.do_eval else None
    trainer.train(run.checkpoint)
    trainer.save_trained()
    results = run.finish(
        trainer,
        method=method.method,
        task="mlm",
        model=arguments.model_name,
        dataset=describe_data(Path(arguments.data).stem, arguments.data, arguments.data_config, splits),
        loss_before=before,
        trained_head=sorted(head),
    )
    after = results["best_scores"].get("loss")
    if before is not None and after is not None:
        log(f"validation perplexity of masked tokens: {math.exp(before):,.1f} before, {math.exp(after):,.1f} after")
    return push(training.output_dir)


def evaluate(name: str, arguments: TextArguments, method: MethodArguments, training: RecipeTrainingArguments) -> None:
    """Compute the loss of a saved adapter or model on the validation split, which split_to_score finds."""
    saved = load_saved(name, None, arguments.model_name, method.base_dtype, AutoModelForMaskedLM)
    model = saved.model
    if Path(name, HEAD_FILE).is_file():
        base_model(model).load_state_dict(load_file(Path(name, HEAD_FILE)), strict=False)
    elif isinstance(model, PeftModel) and not has_head(base_model(model).name_or_path):
        raise RecipeError(
            f"The loss of an adapter needs the head for masked words that was trained with it; {name} lacks "
            f"{HEAD_FILE}, which a push to the Hub leaves out. Evaluate the run's own folder."
        )
    splits = {split: texts(data, split, arguments) for split, data in load_data(arguments, training).items()}
    splits = split_to_score(splits, arguments, saved)
    trainer = make_trainer({}, model, saved.tokenizer, splits, saved.check_length(arguments.max_length), training)
    scores = without_times(trainer.evaluate())
    write_evaluation(training, "mlm", name, scores | {"perplexity": math.exp(scores["loss"])})


def has_head(name: str | None) -> bool:
    """Return whether a checkpoint has a head for masked words, by the class that its configuration names."""
    if name is None:
        return False
    with suppress(OSError, ValueError):  # reported when the model is loaded
        kinds = AutoConfig.from_pretrained(find_model(name)).architectures or ()
        # ELECTRA and Funnel are pretrained to tell replaced words, without a head for masked ones.
        return any(
            kind.endswith("ForMaskedLM")
            or (kind.endswith("ForPreTraining") and not kind.startswith(("Electra", "Funnel")))
            for kind in kinds
        )
    return False


def make_trainer(
    head: dict[str, nn.Parameter],
    model: PeftModel | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: dict[str, Dataset],
    max_length: int,
    training: RecipeTrainingArguments,
) -> "MlmTrainer":
    """Return the trainer, with the tokens of the texts."""
    data = {
        name: tokenize(split, tokenizer, split.column_names, max_length).remove_columns(split.column_names)
        for name, split in splits.items()
        if name != "test"
    }
    return MlmTrainer(
        head,
        model=model,
        args=training,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer),
    )


def train_missing_head(model: PeftModel | PreTrainedModel, missing: set[str]) -> dict[str, nn.Parameter]:
    """Make the weights trainable that the checkpoint lacks, and return them by name.

    The output weights are never among them: they are tied to the input embeddings, which every checkpoint has.
    """
    weights = {name: weight for name, weight in base_model(model).named_parameters() if name in missing}
    for weight in weights.values():
        weight.requires_grad = True
    return weights


def base_model(model: PeftModel | PreTrainedModel) -> PreTrainedModel:
    """Return the model without what PEFT has put around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def keep_pooler(model: PreTrainedModel) -> None:
    """Put the checkpoint's pooler, if it has one, into a model that was loaded without it; it stays frozen."""
    encoder = model.base_model
    if getattr(encoder, POOLER, encoder) is None:
        whole, loading = AutoModel.from_pretrained(model.name_or_path, dtype=model.dtype, output_loading_info=True)
        if getattr(whole, POOLER, None) and not any(name.startswith(f"{POOLER}.") for name in loading["missing_keys"]):
            encoder.pooler = whole.pooler.requires_grad_(False)


def describe(head: dict[str, nn.Parameter], method: MethodArguments) -> str:
    """Return what becomes of the head, for the log."""
    if method.method == "full":
        return f"head for masked words: trained, {'not in the checkpoint' if head else 'like the rest of the model'}"
    if not head:
        return "head for masked words: the checkpoint's, frozen"
    size = sum(weight.numel() for weight in head.values())
    return (
        f"head for masked words: not in the checkpoint; tied to the embeddings, its other {size:,} weights are trained"
    )


def texts(data: Dataset, name: str, arguments: TextArguments) -> Dataset:
    """Return the rows of a split that hold text, and only the columns of the texts."""
    columns = find_text_columns(data, arguments.text_columns)
    check_columns(data, name, columns)
    return rows_with_text(data, name, columns).select_columns(list(columns))


def mask_by_text(collator: DataCollatorForLanguageModeling, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a batch in which the masked words are chosen by its texts, so that they are the same every time."""
    return replace(collator, seed=sum(rows[0]["input_ids"]))(rows)


class MlmTrainer(RecipeTrainer):
    """A trainer for masked words.

    It computes logits only for masked tokens, evaluates with the same words masked every time, and saves the trained
    head with its checkpoints.

    Args:
        head: The trained weights of the head, by name; saved in a file beside an adapter's. A whole model has them.
        kwargs: As for a Trainer.
    """

    def __init__(self, head: dict[str, nn.Parameter], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head = head if isinstance(self.model, PeftModel) else {}

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader[Any]:
        """Return the batches of the validation texts. The same batch always has the same words masked.

        With other words each time, the losses of two epochs would differ by chance as well.
        """
        random_masks, self.data_collator = self.data_collator, partial(mask_by_text, self.data_collator)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = random_masks

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean cross-entropy of the masked tokens; 0 if a batch has none.

        The head costs as much as all of the encoder's layers, and six of seven tokens are not masked.
        """
        labels = inputs.pop("labels")
        masked = labels != -100

        def select(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state[masked].unsqueeze(0)
            return output

        with base_model(self.model).base_model.register_forward_hook(select):
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
