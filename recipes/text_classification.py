r"""Train a Houlsby adapter, or another --method, to classify texts or pairs of texts.

    recipe=recipes/text_classification.py
    accelerate launch $recipe --data tickets.csv --model_name minilm
    accelerate launch $recipe --data new.csv --evaluate runs/tickets    # nothing is trained
    accelerate launch $recipe tickets.yaml --seed 1                     # a file of arguments
    accelerate launch $recipe --data fancyzhx/ag_news --r 16
    accelerate launch $recipe --data folder --text_columns title body --label_columns topic
    accelerate launch $recipe --data tickets.csv --label_columns topic mood  # a task for each
    accelerate launch $recipe --data reviews.csv --method full --learning_rate 3e-5
    # as Houlsby et al. 2019 chose
    python recipes/studies/sweep.py $recipe --data folder --output_dir runs/grid \
        --choose r learning_rate --r 2 4 8 16 32 64 --learning_rate 1e-5 3e-5 1e-4 3e-3

docs/recipes.md says which files are read, and how columns and labels are found.
"""

from run.arguments import ClassifierArguments
from run.command import parse_command
from run.edge import end_with_one_line
from tasks.classification import ClassificationArguments
from tasks.columns import run_columns


def main() -> None:
    run_columns(parse_command(ClassificationArguments, ClassifierArguments))


if __name__ == "__main__":
    end_with_one_line(main)
