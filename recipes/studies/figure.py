"""Draw a figure of the papers from finished runs.

    python recipes/studies/figure.py tradeoff runs/h3
    python recipes/studies/figure.py ablation runs/cola --prune 0.01
    python recipes/studies/figure.py --help

The runs are those of recipes/studies/sweep.py or of single recipes; recipes/studies/*.sh has the
commands for each paper. Each figure is written as PNG and SVG beside its numbers, as JSON lines,
into the first folder; `compare` writes tables.
"""

import argparse
from importlib import import_module
from pathlib import Path

import recipes_path  # noqa: F401
from run.edge import end_with_one_line


FIGURES = (
    *("ablation", "compare", "curves", "init_scale"),
    *("robustness", "stability", "tradeoff"),
)
OF_SEVERAL_FOLDERS = ("robustness",)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    commands = parser.add_subparsers(dest="figure", required=True)
    for name in FIGURES:
        module = import_module(f"figures.{name}")
        text = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(
            name, help=text, description=text, formatter_class=parser.formatter_class
        )
        count = "+" if name in OF_SEVERAL_FOLDERS else None
        command.add_argument("folder", type=Path, nargs=count, help="Folder of finished runs.")
        module.add_flags(command)
        command.set_defaults(draw=module.main)
    arguments = parser.parse_args()
    arguments.draw(arguments.folder, arguments)


if __name__ == "__main__":
    end_with_one_line(main)
