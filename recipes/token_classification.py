r"""Train a Houlsby adapter, or another --method, to tag words: named entities, parts of speech.

    # train.conll, validation.conll
    accelerate launch recipes/token_classification.py --data conll_folder
    accelerate launch recipes/token_classification.py --data lhoestq/conll2003 --learning_rate 1e-3
    accelerate launch recipes/token_classification.py --data conll_folder --method full \
        --learning_rate 3e-5
    # nothing is trained
    accelerate launch recipes/token_classification.py --data new.conll --evaluate runs/tagging

The data have a list of words and a list of tags per sentence, or are .conll files: a word and its
tag per line (the first and the last column), an empty line after each sentence, and comments before
one, such as "# id = 3". Tags such as B-PER are scored by entity, others by word. Each word's tag is
on its first word piece; a sentence longer than --max_length is read in several parts.
"""

from dataclasses import dataclass
from functools import partial

from common.arguments import LabelArguments, RecipeTrainingArguments, flag
from common.command import parse_command
from common.data import find_column
from common.edge import end_with_one_line, log
from common.label_issues import check_labels
from common.labels import MULTI, find_labels
from common.model import Saved
from common.reading import files_of, load_data
from common.splits import divide
from common.tagging import TAG_COLUMNS, WORD_COLUMNS, TaggingTask, read_tags
from common.task import run_task


@dataclass(frozen=True, kw_only=True)
class TaggingArguments(LabelArguments):
    """What to learn, and from which columns."""

    _argument_group_name = "task"

    word_column: str | None = flag(
        aliases=["--text_column_name"],
        default=None,
        help="Column of the words; default: tokens or words.",
    )
    tag_column: str | None = flag(
        aliases=["--label_column_name"],
        default=None,
        help="Column of the tags; default: tags, ner_tags, pos_tags, ...",
    )


def main() -> None:
    command = parse_command(TaggingArguments).for_task("tagging")
    arguments, training = command.arguments, command.training
    load = check_labels(partial(load_task, arguments, training), command)
    if load is not None:
        run_task(TaggingTask, load, command, files_of(arguments))


def load_task(
    arguments: TaggingArguments, training: RecipeTrainingArguments, saved: Saved | None
) -> TaggingTask:
    """Load the sentences to train on or, given something saved, those to score it on."""
    data = load_data(arguments, training)
    word_column = find_column(data["train"], arguments.word_column, WORD_COLUMNS, "--word_column")
    tag_column = find_column(data["train"], arguments.tag_column, TAG_COLUMNS, "--tag_column")
    tags = saved.labels if saved else find_labels(data["train"], [tag_column], MULTI).names
    splits = {}
    results = saved.results if saved else None
    for name, split in divide(data, arguments, training, results).items():
        splits[name] = read_tags(split, name, (word_column, tag_column), tags)
    if not saved:
        log(f"{len(splits['train']):,} training sentences; {len(tags)} tags: {', '.join(tags)}")
    task = TaggingTask(name="tagging", labels=tags, splits=splits)
    if arguments.check_labels:
        task.undivided = read_tags(data["train"], "train", (word_column, tag_column), tags)
    return task


if __name__ == "__main__":
    end_with_one_line(main)
