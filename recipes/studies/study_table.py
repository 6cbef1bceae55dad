"""Print the results of all runs below a folder beside the papers' lines.

    python recipes/studies/study_table.py runs/study
    python recipes/studies/study_table.py runs/study --choose r learning_rate num_train_epochs

The second one chooses the best size per task. Writes study.md and a CSV file per table into the
folder. All scores are on the validation split at the epoch that it has chosen, the papers'
mostly on the test split; a dash stands for a missing score. The table "Chosen on validation" names
the folder of each task's best run, which has the files for GLUE's server if the sweep had
--predict.
"""

import argparse
from pathlib import Path

import recipes_path  # noqa: F401
from figures import flags
from results.study import print_study
from run.edge import end_with_one_line


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="Folder of a sweep, or of several.")
    flags.add_choose(parser)
    flags.add_score(parser)
    arguments = parser.parse_args()
    print_study(arguments.folder, arguments.choose, arguments.score)


if __name__ == "__main__":
    end_with_one_line(main)
