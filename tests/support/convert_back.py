"""Convert the golden folders of AdapterHub, and convert them back, for `make_adapterhub_golden.py check`.

PYTHONPATH=. python tests/support/convert_back.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import houlsby_peft
from adapterhub_models import CONFIGS, tiny_config


GOLDEN = Path(__file__).resolve().parents[1] / "data" / "adapterhub"


def main(folder: Path) -> None:
    for model in CONFIGS:
        tiny_config(model).save_pretrained(folder / "bases" / model)
    for source in sorted(path for path in GOLDEN.iterdir() if path.is_dir()):
        base = folder / "bases" / source.name.partition("-")[0]
        try:
            there = houlsby_peft.convert(source, folder / "ours" / source.name, base_model=base, allow_pickle=True)
        except houlsby_peft.AdapterError as error:
            print(error)
            continue
        houlsby_peft.convert(there, folder / source.name, to="adapterhub")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
