"""The end of a run: its scores, figures and files, and the commands to type next."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Value
from huggingface_hub.utils import HFValidationError, validate_repo_id
from peft.utils import CONFIG_NAME

from common.arguments import looks_like_a_path
from common.same_run import read_object
from common.scores import ClassScores, ValueScores, format_scores
from common.trainer import Described, RecipeTrainer


CONFUSION_FILE, CURVES_FILE = "confusion_matrix.png", "learning_curves.png"
RELIABILITY_FILE, VALUES_FILE, MISTAKES_FILE = "reliability.png", "values.png", "mistakes.csv"
MAX_MISTAKES = 20
MAX_CLASSES = 40  # in a confusion matrix, to be readable on a page
_MAX_EXAMPLE = 80  # characters of a text in a command


def report_end(
    trainer: RecipeTrainer, results: Mapping[str, Any], kept: Described | None, example: str | Sequence[str] | None
) -> None:
    """Draw the figures of a finished run, and print its scores, its files and how to predict. Call it in the main
    process."""
    output, saved = Path(trainer.args.output_dir), Path(trainer.args.output_dir, trainer.saved_as)
    print(f"\n{_describe_scores(trainer, results)}")
    size = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    rows = {
        trainer.saved_as.capitalize(): f"{saved} ({_format_bytes(size)}), {_format_seconds(results['seconds'])}",
        "Results": str(output / "results.json"),
    }
    if kept is not None:
        print_by_class(kept)
        rows |= write_figures(output, kept, results["task"])
    rows |= _draw_curves(trainer, results)
    if example is not None and is_houlsby(saved):
        rows["Predict"] = predict_command(saved, example)
        rows["In a browser"] = shlex.join([*_tool(), "serve", "--adapters", str(saved)])
    print_files(rows)


def print_by_class(kept: Described) -> None:
    """Print the scores of each class."""
    if isinstance(kept.scores, ClassScores):
        print(f"\nBy class, on the {kept.split} split:\n{kept.scores.table()}")


def print_files(rows: Mapping[str, str]) -> None:
    """Print names of files, and commands, below one another."""
    print("\n" + "\n".join(f"{name + ':':<18}{value}" for name, value in rows.items()), flush=True)


def write_figures(output: Path, kept: Described, task: str, prefix: str = "") -> dict[str, str]:
    """Write what helps to find errors of the model and of the data, with names that begin with `prefix`.

    That is the confusion matrix, the mistakes of which the model was most confident, and how reliable its
    probabilities are; of scores, the predictions against the targets.

    Returns:
        What was written, by the names of the files.
    """
    # Only now: the import takes a second, and a recipe should be fast to find a wrong flag.
    from common.figures import draw_confusion, draw_reliability, draw_values, save_png

    files = {
        name: output / f"{prefix}{name}" for name in (CONFUSION_FILE, RELIABILITY_FILE, VALUES_FILE, MISTAKES_FILE)
    }
    for file in files.values():
        file.unlink(missing_ok=True)  # of an earlier run
    title, scores, written = f"{task}, {kept.split}", kept.scores, {}
    if isinstance(scores, ValueScores):
        save_png(draw_values(scores.expected, scores.predicted, title), files[VALUES_FILE])
        return {"Predictions": str(files[VALUES_FILE])}
    confusion = scores.confusion()
    if confusion is not None and len(confusion[1]) <= MAX_CLASSES:
        save_png(draw_confusion(*confusion, title), files[CONFUSION_FILE])
        written["Confusion matrix"] = str(files[CONFUSION_FILE])
    elif confusion is not None:
        written["Confusion matrix"] = f"not drawn for {len(confusion[1])} classes (at most {MAX_CLASSES})"
    if scores.confidence is not None and len(scores.confidence):
        bins, error = scores.reliability()
        save_png(draw_reliability(bins, error, title), files[RELIABILITY_FILE])
        written["Reliability"] = f"{files[RELIABILITY_FILE]} (expected calibration error {error:.3f})"
        mistakes = scores.mistakes(MAX_MISTAKES)
        texts = {name: kept.data[name] for name, kind in kept.data.features.items() if kind == Value("string")}
        if len(mistakes) and texts:
            table = mistakes.assign(
                **{name: [column[row] for row in mistakes["row"]] for name, column in texts.items()}
            )
            table.map(defused).to_csv(files[MISTAKES_FILE], index=False)
            wrong = int((scores.expected != scores.predicted).sum())
            written["Mistakes"] = f"{files[MISTAKES_FILE]} (the most confident {len(mistakes)} of {wrong:,})"
    return written


def defused(value: Any) -> Any:
    """Return a cell that a spreadsheet does not compute: one that begins as a formula gets an apostrophe before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _describe_scores(trainer: RecipeTrainer, results: Mapping[str, Any]) -> str:
    """Return the scores of the kept weights, for validation and, if there is one, the test split."""
    kept = next((entry for entry in results["epochs"] if entry["step"] == trainer.kept_step), None)
    if kept is None:
        return "Not evaluated."
    which = "Last" if results["best_epoch"] is None else "Best"
    of = f" of {trainer.state.num_train_epochs}" if float(kept["epoch"]).is_integer() else ""
    chosen = results["chosen_by"].removeprefix("eval_")
    scores = dict(sorted(results["best_scores"].items(), key=lambda item: (item[0] != chosen, item[0] == "loss")))
    lines = [f"{which} epoch: {kept['epoch']:.4g}{of}, with {format_scores(scores)} on validation"]
    test = results.get("test")
    if test and all(isinstance(score, float) for score in test.values()):
        lines.append(f"Test: {format_scores(test)}")
    return "\n".join(lines)


def _draw_curves(trainer: RecipeTrainer, results: Mapping[str, Any]) -> dict[str, str]:
    from common.figures import draw_learning_curves, save_png

    file = Path(trainer.args.output_dir, CURVES_FILE)
    file.unlink(missing_ok=True)  # of an earlier run
    if len(results["epochs"]) < 2:
        return {}
    kept = next((entry["epoch"] for entry in results["epochs"] if entry["step"] == trainer.kept_step), None)
    save_png(draw_learning_curves(trainer.state.log_history, results["epochs"], results["chosen_by"], kept), file)
    return {"Learning curves": str(file)}


def is_houlsby(folder: Path) -> bool:
    """Return whether a folder holds a saved Houlsby adapter."""
    return (read_object(folder / CONFIG_NAME) or {}).get("peft_type") == "HOULSBY"


def predict_command(adapter: Path, example: str | Sequence[str]) -> str:
    """Return the command that predicts for an example, which is shortened."""
    texts = [_shorten(text) for text in ([example] if isinstance(example, str) else example)]
    return shlex.join([*_tool(), "predict", str(adapter), *texts, *(["--pairs"] if len(texts) == 2 else [])])


def push_command(
    adapter: Path,
    name: str,
    results: Path,
    base_model: str,
    private: bool,
    example: str | tuple[str, str] | Sequence[str | tuple[str, str]] | None = None,
) -> str | None:
    """Return the command that pushes a saved adapter to the Hub; None if its base model is not known to be there."""
    if looks_like_a_path(base_model):
        return None
    words = [*_tool(), "push", str(adapter), _repo_name(name)]
    if (read_object(adapter / CONFIG_NAME) or {}).get("base_model_name_or_path") != base_model:
        words += ["--base-model", base_model]
    words += ["--results", str(results)] if results.exists() else []
    inputs = [example] if isinstance(example, (str, tuple)) else example or []
    texts = [text for item in inputs for text in (item if isinstance(item, tuple) else [item])]
    words += [f"--example={text}" for text in texts]  # a text may begin with a dash
    return shlex.join([*words, *["--pairs"] * (len(texts) > len(inputs)), *["--private"] * private])


def _repo_name(name: str) -> str:
    try:
        validate_repo_id(name)
    except HFValidationError:
        kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)
        return "-".join(filter(None, kept.split("-")))[:90] or "adapter"
    return name


def _tool() -> list[str]:
    """Return how to call `houlsby-peft`, also if its environment is not activated."""
    beside = Path(sys.executable).with_name("houlsby-peft")
    if shutil.which("houlsby-peft"):
        return ["houlsby-peft"]
    if beside.exists() and beside.is_relative_to(Path.cwd()):
        return [str(beside.relative_to(Path.cwd()))]
    return [sys.executable, "-m", "houlsby_peft_cli"]


def _shorten(text: str) -> str:
    """Return the beginning of a text on one line, which a parser of arguments does not take for a flag."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split()).lstrip("-")
    if len(line) > _MAX_EXAMPLE:
        line = line[:_MAX_EXAMPLE].rpartition(" ")[0] or line[:_MAX_EXAMPLE]
    return line.strip() or "text"


def _format_bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def _format_seconds(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (hours + minutes > 0) + [f"{seconds} s"] * (hours == 0)
    return f"trained in {' '.join(parts)}"
