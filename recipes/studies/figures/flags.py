"""The flags that several figures and tables have."""

import argparse

from sweeping.runs import CHOICES, CHOSEN


def add_score(parser: argparse.ArgumentParser, default: str = "main") -> None:
    parser.add_argument(
        "--score",
        choices=("accuracy", "main"),
        default=default,
        help="A task without accuracy has its main score.",
    )


def add_split(parser: argparse.ArgumentParser) -> None:
    choices = ("validation", "test")
    parser.add_argument("--split", choices=choices, default=choices[0], help="Where it was scored.")


def add_choose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--choose", nargs="+", choices=CHOICES, default=CHOSEN, help="What validation chooses."
    )


def add_evaluation(parser: argparse.ArgumentParser, sample: int | None = None) -> None:
    """Add the flags of figures that score finished runs anew."""
    parser.add_argument("--data_dir", help="Folder of the tasks' files; default: the runs' own.")
    parser.add_argument(
        "--max_eval_samples", type=int, default=sample, help="Use a random sample of this size."
    )
    parser.add_argument("--batch_size", type=int, default=64, help="Sentences per evaluation step.")
