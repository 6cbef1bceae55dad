"""Model cards: what is known of a trained adapter, as a page that people can read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import CardData, ModelCard, ModelCardData

from ..checkpoints.untrusted import WEIGHTS_FILE, check_weights, read_config
from ..config import HoulsbyConfig
from ..errors import AdapterError
from ..heads.tasks import task_of_config
from ..serving.predictor import Input
from .card_facts import adapter_rows, base_rows, data_rows, environment_rows, hyperparameter_rows, limits, summary
from .card_metadata import card_metadata
from .card_results import Results, Run, log_table, of_method, read_runs, score_table, table_of_test_scores
from .card_sections import is_template, mark, update


CARD_FILE = "README.md"
_TEMPLATE = "adapter_card.md.jinja"


def make_card(
    folder: Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    results: Results | None = None,
    metadata: Mapping[str, Any] | None = None,
    example: Input | Sequence[Input] | None = None,
    answer: Sequence[object] | None = None,
) -> ModelCard:
    """The card of the adapter in a folder.

    Args:
        folder: of the saved adapter; the PNG files in it are shown.
        repo_id: the adapter's name on the Hub.
        base_model: the base model's name on the Hub; default: the one that the adapter records.
        results: results.json of a run, or of a run per seed, as files or mappings.
        metadata: further metadata, such as `license`, `language` and `tags`.
        example: an input or a list of them, for the snippet.
        answer: what the adapter gave for each.

    Raises:
        AdapterError: The folder holds no usable adapter, or the results cannot be read.
        ValueError: The Hub would refuse the metadata.
    """
    config, runs = read_config(folder), read_runs(results)
    task, base = task_of_config(config), base_model or str(config.base_model_name_or_path)
    name = repo_id.rpartition("/")[2]
    data = card_metadata(name, base, task, runs, metadata)
    body = _template().render(
        name=name,
        repo_id=repo_id,
        base_model=base,
        base=base_rows(config, base),
        auto_class=task.auto_class,
        num_labels=len(config.id2label or {}),
        two_layer_head=config.two_layer_head,
        example=None if example is None else _in_code(example),
        answer=answer,
        figures=sorted(path.name for path in folder.glob("*.png")),
        **_measured(folder, config, runs),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{mark(body)}")


def _measured(folder: Path, config: HoulsbyConfig, runs: Sequence[Run]) -> dict[str, Any]:
    """The variables of the template that follow from the weights and from the runs."""
    sizes, file_bytes = check_weights(folder, config), (folder / WEIGHTS_FILE).stat().st_size
    own = of_method(runs, "houlsby")
    run: Run = own[0] if own else {}
    changed, unchanged = hyperparameter_rows(run)
    return {
        "summary": summary(config, sizes, own),
        "adapter": adapter_rows(config, sizes, file_bytes, run.get("total_parameters")),
        "seeds": [item.get("seed", number) for number, item in enumerate(own, 1)],
        "split": run.get("dataset", {}).get("split"),
        "scores": score_table(runs),
        "test": table_of_test_scores(run),
        "data": data_rows(run),
        "changed": changed,
        "unchanged": unchanged,
        "log": log_table(run),
        "environment": environment_rows(run),
        "limits": limits(config, own),
        "command": run.get("command"),
    }


def merge_cards(card: ModelCard, old: Iterable[Path]) -> ModelCard:
    """A new card, with the sections and metadata of old ones that people have written.

    Args:
        card: what `make_card` gave.
        old: files of older cards. Of several versions of a section written by hand, the last one's stays.

    Raises:
        AdapterError: The metadata of an old card are not YAML.
    """
    data: CardData = card.data
    body = card.text.lstrip("\n")
    for path in old:
        text = path.read_text(encoding="utf-8")
        if is_template(text):
            continue
        try:
            found = ModelCard(text, ignore_metadata_errors=True)
        except Exception as error:  # the parser's errors are no ValueErrors
            raise AdapterError(f"{path} begins with metadata that are no YAML; repair them: {error}") from error
        body = update(body, found.text)
        data = _with_further(data, found.data)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")


def _in_code(example: Input | Sequence[Input]) -> str:
    """An example as Python, each text of several on a line of its own."""
    if isinstance(example, str):
        return json.dumps(example, ensure_ascii=False)
    first, last = "()" if isinstance(example, tuple) else "[]"
    items = (_in_code(item).replace("\n", "\n    ") for item in example)
    return "\n".join([first, *(f"    {item}," for item in items), last])


def _template() -> jinja2.Template:
    templates = files("houlsby_peft.hub_cards")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["cell"] = lambda value: str(value).replace("|", "\\|").replace("\n", " ")
    return environment.from_string((templates / _TEMPLATE).read_text(encoding="utf-8"))


def _with_further(data: CardData, old: CardData) -> CardData:
    """Metadata with the keys of an old card that are not generated, and with its tags."""
    merged = data.to_dict()
    for key, value in old.to_dict().items():
        if key not in ("model-index", "metrics", "co2_eq_emissions"):
            merged.setdefault(key, value)
    merged["tags"] = sorted({*merged["tags"], *(old.to_dict().get("tags") or ())})
    return ModelCardData(**merged)
