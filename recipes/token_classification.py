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

from transformers.hf_argparser import HfArg

from common.arguments import AdapterArguments, DataArguments, MethodArguments, RecipeParser, RecipeTrainingArguments
from common.data import sample, with_validation
from common.edge import end_with_one_line, log
from common.model import load_saved, settle
from common.run import EVALUATED, Run, find_evaluated, plan_push
from common.tagging import TaggingTask, find_columns, find_tags, read_tags
from common.task import evaluate, files_of, load_data, split_to_score, train


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
    name = find_evaluated(arguments, adapter, training)
    saved = name and load_saved(name, None, arguments.model_name, method.base_dtype, TaggingTask.auto_class)
    if saved is None:
        method = settle(method, adapter, training, arguments.model_name)
        push = plan_push(training, arguments.model_name)
        run = Run(training, arguments, method, adapter, files=files_of(arguments))
        if run.results is not None and not run.new_test:
            return push(training.output_dir)

    splits = load_data(arguments, training)
    columns = find_columns(splits["train"], arguments.word_column, arguments.tag_column)
    tags = saved.labels if saved else find_tags(splits["train"], columns[1])
    if saved:
        splits = split_to_score(splits, arguments, saved)
        splits = {split: read_tags(data, split, columns, tags) for split, data in splits.items()}
        task = TaggingTask(name="tagging", labels=tags, splits=splits)
        evaluate(task, saved, arguments, training, EVALUATED)
        return None

    splits = with_validation({split: read_tags(data, split, columns, tags) for split, data in splits.items()})
    splits["train"] = sample(splits["train"], arguments.max_train_samples)
    task = TaggingTask(name="tagging", labels=tags, splits=splits)
    if run.results is None:
        log(f"{len(splits['train']):,} training sentences; {len(tags)} tags: {', '.join(tags)}")
        train(task, run, arguments, method, adapter, training, tags=tags)
    elif "test" in splits:  # finished, with another test file
        saved = load_saved(run.saved, None, arguments.model_name, method.base_dtype, task.auto_class)
        trainer = task.make_trainer(saved.model, saved.tokenizer, arguments.max_length, training)
        run.add(test=task.predict_test(trainer))
    push(training.output_dir)


if __name__ == "__main__":
    end_with_one_line(main)
