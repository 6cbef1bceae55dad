"""Draw a figure of the papers from finished runs.

    python recipes/figure.py tradeoff runs/h3
    python recipes/figure.py ablation runs/cola --prune 0.01
    python recipes/figure.py --help

The runs are those of recipes/sweep.py or of single recipes; recipes/papers/*.sh has the commands for each paper. Each
figure is written as PNG and SVG beside its numbers, as JSON lines, into the first folder.
"""

import argparse
from importlib import import_module

from common.edge import end_with_one_line


FIGURES = {
    "ablation": "score without the adapters of each span of layers (Houlsby 6 left, Mohebbi 8)",
    "compare": "methods or variants beside a baseline: scores, sizes, times (tables; Houlsby, section 3.6)",
    "curves": "validation scores by epoch, step or seconds (Han 1, 13)",
    "depth": "score against the cost of many tasks on one text, by the number of adapted layers",
    "init_scale": "score against the scale of the initial weights and the size (Houlsby 6 right, section 3.6)",
    "robustness": "how often synonyms change a prediction (Han 5)",
    "stability": "the spread over seeds and lengths of training, gradients by layer (Han 1-4, 9, 10, 13)",
    "tradeoff": "score against trained parameters (Houlsby 1, 3, 4, 5)",
}


def main() -> None:
    """Read the command line, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    commands = parser.add_subparsers(dest="figure", required=True)
    for name, text in FIGURES.items():
        command = commands.add_parser(name, help=text, description=text, formatter_class=parser.formatter_class)
        command.add_argument("folder", nargs="+" if name == "robustness" else None, help="Folder of finished runs.")
        module = import_module(f"papers.{name}")
        module.add_flags(command)
        command.set_defaults(draw=module.main)
    arguments = parser.parse_args()
    arguments.draw(arguments)


if __name__ == "__main__":
    end_with_one_line(main)
