"""Train a Houlsby adapter, or another --method, to tag words: named entities, parts of speech.

    accelerate launch recipes/token_classification.py --data conll_folder             # train.conll, validation.conll
    accelerate launch recipes/token_classification.py --data lhoestq/conll2003 --learning_rate 1e-3
    accelerate launch recipes/token_classification.py --data conll_folder --method full --learning_rate 3e-5
    accelerate launch recipes/token_classification.py --data new.conll --evaluate runs/tagging    # nothing is trained

The data have a list of words and a list of tags per sentence, or are .conll files: a word and its tag per line (the
first and the last column), an empty line after each sentence, and comments before one, such as "# id = 3". Tags such
as B-PER are scored by entity, others by word. Each word's tag is on its first word piece; a sentence longer than
--max_length is read in several parts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.hf_argparser import HfArg

from tasks.tagging import Tags, find_columns, find_tags, tokenize_words
from training.arguments import AdapterArguments, DataArguments, RecipeParser, RecipeTrainingArguments
from training.data import describe_data, sample, with_validation
from training.errors import end_with_one_line
from training.evaluation import find_evaluated, with_evaluated, write_evaluation
from training.methods import MethodArguments, prepare_model
from training.model import load_model, load_saved, read_results, recorded_labels, recorded_length
from training.results import without_times
from training.runs import Run, plan_push
from training.trainer import RecipeTrainer


@dataclass(kw_only=True)
class TaggingArguments(DataArguments):
    """What to learn, and from which columns."""

    _argument_group_name = "task"

    word_column: str | None = HfArg(
        aliases=["--text_column_name"], default=None, help="Column of the words; default: tokens or words."
    )
    tag_column: str | None = HfArg(
        aliases=["--label_column_name"],
        default=None,
        help="Column of the tags; default: tags, ner_tags, pos_tags, ...",
    )


def main() -> None:
    """Read the command line, train, keep the best epoch, save the trained weights and results.json."""
    groups = (TaggingArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/token_classification.py --data DATA [flags]")
    arguments, method, adapter, training = parser.parse()
    training.output_dir = training.output_dir.replace("{task}", "tagging")
    saved = find_evaluated(arguments, adapter, training)
    if saved is not None:
        evaluate(saved, arguments, method, training)
        return
    method = method.settled(adapter, training)
    push = plan_push(training, arguments.model_name)
    with training.main_process_first():
        splits = arguments.load_splits()
    tags = find_tags(splits["train"], arguments.word_column, arguments.tag_column)
    run = Run(training, arguments, method, adapter, files=arguments.find_files(), classes=tags.names)
    test_file = arguments.describe_test()
    if run.results is not None:
        is_missing = run.has_other_test_file(test_file) or run.results["test"] is None
        if training.do_predict and "test" in splits and is_missing:
            saved = f"{training.output_dir}/{'adapter' if method.adds_weights else 'model'}"
            run.add(test=evaluate(saved, arguments, method, training)["test"], test_file=test_file)
        return push(training.output_dir)

    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    training.choose_by(tags.scores)
    splits = with_validation({name: tags.read(split, name) for name, split in splits.items()})
    splits["train"] = sample(splits["train"], arguments.max_train_samples)
    id2label = dict(enumerate(tags.names))
    model, tokenizer, _ = load_model(
        AutoModelForTokenClassification,
        arguments.model_name,
        method.base_dtype,
        id2label=id2label,
        label2id={tag: number for number, tag in id2label.items()},
    )
    fields = {"task_type": "TOKEN_CLS", "id2label": id2label}
    model = prepare_model(model, method, adapter, training, arguments.max_length, **fields)
    if training.should_log:
        print(f"{len(splits['train']):,} training sentences; {len(tags.names)} tags: {', '.join(tags.names)}")
    trainer, data = make_trainer(tags, model, tokenizer, splits, arguments.max_length, training)
    trainer.train(run.checkpoint)
    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them
    test = score_test(trainer, data)
    dataset = describe_data(Path(arguments.data).stem, arguments.data, arguments.data_config, splits)
    run.finish(
        trainer,
        example=" ".join(splits["validation"][0]["words"]),
        method=method.method,
        task="tagging",
        model=arguments.model_name,
        dataset=dataset,
        labels=tags.names,
        tags=tags.names,
        test=test,
        test_file=test_file,
    )
    push(training.output_dir)


def evaluate(
    saved: str, arguments: TaggingArguments, method: MethodArguments, training: RecipeTrainingArguments
) -> dict[str, Any]:
    """Score a saved adapter or model on the validation split, which with_evaluated finds, and on the test split.
    Return the content of evaluation.json."""
    model, tokenizer = load_saved(
        saved, None, arguments.model_name, method.base_dtype, AutoModelForTokenClassification
    )
    splits = with_evaluated(arguments.load_splits(), arguments, read_results(saved))
    columns = find_columns(splits.pop("train"), arguments.word_column, arguments.tag_column)
    tags = Tags(*columns, recorded_labels(saved, model)[0])
    splits = {name: tags.read(split, name) for name, split in splits.items()}
    max_length = arguments.max_length or recorded_length(saved, model)
    trainer, data = make_trainer(tags, model, tokenizer, splits, max_length, training)
    scores = without_times(trainer.evaluate())
    dataset = describe_data(Path(arguments.data).stem, arguments.data, arguments.data_config, splits)
    test = score_test(trainer, data)
    return write_evaluation(training, "tagging", saved, scores, dataset=dataset, labels=tags.names, test=test)


def make_trainer(
    tags: Tags,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: dict[str, Dataset],
    max_length: int,
    training: RecipeTrainingArguments,
) -> tuple[RecipeTrainer, dict[str, Dataset]]:
    """Return the trainer, and the splits as word pieces."""
    data = {
        name: tokenize_words(zip(split["words"], split["tags"], strict=True), tokenizer, max_length)
        for name, split in splits.items()
    }
    trainer = RecipeTrainer(
        model=model,
        args=training,
        train_dataset=data.get("train"),
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=lambda evaluation: tags.score(evaluation.predictions, evaluation.label_ids),
        score_classes=tags.score_classes,
    )
    return trainer, data


def score_test(trainer: RecipeTrainer, data: dict[str, Dataset]) -> dict[str, float] | None:
    """Return the scores of the test split, or None without one or without --do_predict."""
    if "test" not in data or not trainer.args.do_predict:
        return None
    return trainer.compute_metrics(trainer.predict(data["test"]))


if __name__ == "__main__":
    end_with_one_line(main)
