r"""Train a Houlsby adapter, or another --method, to tag words: named entities, parts of speech.

    # train.conll, validation.conll
    accelerate launch recipes/token_classification.py --data conll_folder
    accelerate launch recipes/token_classification.py --data lhoestq/conll2003 --r 16
    accelerate launch recipes/token_classification.py --data conll_folder --method full \
        --learning_rate 3e-5
    # nothing is trained
    accelerate launch recipes/token_classification.py --data new.conll --evaluate runs/conll_folder

The data have a list of words and a list of tags per sentence, or a text with marked spans, as
annotation tools export them, or are .conll files: a word and its tags per line and an empty line
after each sentence. Which columns are read is said. Tags of any scheme, such as B-PER, U-PER or
B_PER, are read as IOB2 and scored by entity, others by word. Each word's tag is on its first word
piece; a sentence longer than --max_length is read in several parts.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from data.labels import classes_in
from data.reading import files_of, load_data
from data.splits import divide
from data.words import read_words
from run.arguments import LabelArguments, ReadOptions
from run.command import parse_command
from run.edge import RecipeError, end_with_one_line, log
from run.run_task import run_task
from run.saved import Saved
from run.training_arguments import RecipeTrainingArguments, flag
from tasks.label_issues import check_labels
from tasks.tagging import TaggingTask, number_tags


@dataclass(frozen=True, kw_only=True)
class TaggingArguments(LabelArguments):
    """What to learn, and from which columns."""

    _argument_group_name = "task"

    word_column: str | None = flag(
        aliases=["--text_column_name"],
        default=None,
        help="Column of the words, by name or, of files with a word per line, by number; default: "
        "detected.",
    )
    tag_column: str | None = flag(
        aliases=["--label_column_name"],
        default=None,
        help="Column of the tags, by name or by number; default: detected.",
    )
    tag_names: list[str] | None = flag(
        default=None, help="Names of the tags, if the data have their numbers from 0 on."
    )

    @property
    def read_options(self) -> ReadOptions:
        numbers: dict[str, Any] = {}
        for name in ("word_column", "tag_column"):
            column = getattr(self, name)
            if column is not None and column.isdecimal():
                numbers[name] = int(column)
        return replace(super().read_options, has_words=True, **numbers)


def main() -> None:
    command = parse_command(TaggingArguments)
    command = command.for_task(command.arguments.name)
    arguments, training = command.arguments, command.training
    load = check_labels(partial(load_task, arguments, training), command)
    if load is not None:
        run_task(TaggingTask, load, command, files_of(arguments))


def load_task(
    arguments: TaggingArguments, training: RecipeTrainingArguments, saved: Saved | None
) -> TaggingTask:
    """Load the sentences to train on or, given something saved, those to score it on."""
    data, declared = read_words(
        load_data(arguments, training),
        None if arguments.read_options.word_column else arguments.word_column,
        None if arguments.read_options.tag_column else arguments.tag_column,
        saved.labels if saved else arguments.tag_names,
        arguments.title_of,
    )
    tags = (
        saved.labels
        if saved
        else declared or classes_in([tuple(row) for row in data["train"]["tags"]])
    )
    if len(tags) < 2:
        raise RecipeError(
            f"The training words must have two tags, they have {''.join(tags) or 'none'}. See "
            "--tag_column."
        )
    splits = {}
    results = saved.results if saved else None
    for name, split in divide(data, arguments, training, results).items():
        splits[name] = number_tags(split, arguments.title_of(name), tags)
    if not saved:
        counts = Counter(chain.from_iterable(splits["train"]["tags"]))
        # A tag that is misspelled stands out by its number.
        listed = [f"{tag} {counts[number]:,}" for number, tag in enumerate(tags)]
        log(f"{len(splits['train']):,} training sentences; {len(tags)} tags: {', '.join(listed)}")
    undivided = None if saved else number_tags(data["train"], "train", tags)
    return TaggingTask(name="tagging", labels=tags, splits=splits, undivided=undivided)


if __name__ == "__main__":
    end_with_one_line(main)
