"""Train a Houlsby adapter to tag words: named entities, parts of speech.

    accelerate launch recipes/token_classification.py --data conll_folder             # train.conll, validation.conll
    accelerate launch recipes/token_classification.py --data tner/wnut2017 --learning_rate 1e-3

The data have a list of words and a list of tags per sentence, or are .conll files: a word and its tag per line (the
first and the last column), an empty line after each sentence. Tags such as B-PER are scored by entity, others by word.
Each word's tag is on its first word piece; a sentence longer than --max_length is read in several parts.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification, EvalPrediction, set_seed
from transformers.hf_argparser import HfArg

from tasks.tagging import find_tags, tokenize_words
from training.arguments import AdapterArguments, DataArguments, RecipeParser, RecipeTrainingArguments
from training.data import describe_data, load_splits, sample, with_validation
from training.errors import end_with_one_line
from training.model import add_adapter, load_model, record_preprocessing
from training.runs import Run, plan_push
from training.trainer import RecipeTrainer


@dataclass(kw_only=True)
class TaggingArguments(DataArguments):
    """What to learn, and from which columns."""

    _argument_group_name = "task"

    word_column: str | None = HfArg(default=None, help="Column of the words; default: tokens or words.")
    tag_column: str | None = HfArg(default=None, help="Column of the tags; default: tags, ner_tags, pos_tags, ...")


def main() -> None:
    """Read the command line, train, keep the best epoch, save the adapter and results.json."""
    groups = (TaggingArguments, AdapterArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/token_classification.py --data DATA [flags]")
    arguments, adapter, training = parser.parse()
    training.output_dir = training.output_dir.replace("{task}", "tagging")
    push = plan_push(training, arguments.model_name)
    run = Run(training, arguments, adapter)
    if run.results is not None:
        return push(training.output_dir)

    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    with training.main_process_first():
        splits = load_splits(arguments.data, arguments.data_config)
    tags = find_tags(splits["train"], arguments.word_column, arguments.tag_column)
    training.choose_by(tags.scores)
    splits = with_validation({name: tags.read(split, name) for name, split in splits.items()})
    splits["train"] = sample(splits["train"], arguments.max_train_samples)
    id2label = dict(enumerate(tags.names))
    model, tokenizer, _ = load_model(
        AutoModelForTokenClassification,
        arguments.model_name,
        id2label=id2label,
        label2id={tag: number for number, tag in id2label.items()},
    )
    model = add_adapter(model, adapter.config(task_type="TOKEN_CLS", id2label=id2label), adapter.init_adapter)
    record_preprocessing(model, arguments.max_length)
    if training.should_log:
        print(f"{len(splits['train']):,} training sentences; {len(tags.names)} tags: {', '.join(tags.names)}")
    data = {
        name: tokenize_words(zip(split["words"], split["tags"], strict=True), tokenizer, arguments.max_length)
        for name, split in splits.items()
    }

    def score(evaluation: EvalPrediction) -> dict[str, float]:
        return tags.score(evaluation.predictions, evaluation.label_ids)

    trainer = RecipeTrainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=score,
    )
    trainer.train(run.checkpoint)
    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them
    test = score(trainer.predict(data["test"])) if "test" in data else None
    dataset = describe_data(Path(arguments.data).stem, arguments.data, arguments.data_config, splits)
    run.finish(trainer, task="tagging", model=arguments.model_name, dataset=dataset, tags=tags.names, test=test)
    push(training.output_dir)


if __name__ == "__main__":
    end_with_one_line(main)
