"""Model cards: describe a trained adapter, its base model and its results on one page."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import metadata as read_metadata
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from huggingface_hub import ModelCard, constants
from peft.utils import SAFETENSORS_WEIGHTS_NAME

from ..checkpoints.untrusted import check_weights, read_config
from ..config import HoulsbyConfig
from ..errors import AdapterError
from ..heads.tasks import Task, task_of_config
from .markdown import Markdown, block, cell, code, escape, link
from .merging import merge_cards
from .metadata import as_list, is_repo_id, make_metadata, make_widget
from .results import (
    Results,
    Rows,
    TrainingRun,
    collect_scores,
    data_rows,
    drop_empty,
    environment_rows,
    find_results,
    format_mean,
    get_scores,
    hyperparameter_tables,
    log_table,
    read_runs,
    readable_name,
    score_table,
    select_method,
    table_of_test_scores,
)
from .sections import mark


if TYPE_CHECKING:
    from ..serving.predictor import Input


CARD_FILE = constants.REPOCARD_NAME
_TEMPLATE = "adapter_card.md.jinja"
_MOST_ITEMS = 20
_UNKNOWN_BASE = "not on record, as the base model was loaded from a folder"


def write_card(folder: Path, repo_id: str | None = None, **options: Any) -> Path:
    """Write the card of the adapter in a folder, and keep what people have written into the one that is there.

    Args:
        folder: Folder of the saved adapter.
        repo_id: The adapter's name on the Hub, if it is known.
        options: Further arguments of `make_card`.

    Returns:
        The file.

    Raises:
        AdapterError, ValueError: As for `make_card` and `merge_cards`.
    """
    path = folder / CARD_FILE
    merge_cards(make_card(folder, repo_id, **options), [path] if path.is_file() else []).save(path)
    return path


def write_card_of_saved(folder: Path, **options: Any) -> None:
    """Write the card of an adapter that has just been saved. If that fails, warn, because the adapter is saved.

    Args:
        folder: Folder of the adapter.
        options: Further arguments of `make_card`.
    """
    try:
        write_card(folder, **options)
    except (ValueError, OSError) as error:
        warnings.warn(
            f"The adapter is saved, but its card is not written: {error} Then run: houlsby-peft card {folder}",
            stacklevel=2,
        )


def make_card(
    folder: Path,
    repo_id: str | None = None,
    *,
    base_model: str | None = None,
    results: Results | None = None,
    metadata: Mapping[str, Any] | None = None,
    example: Input | Sequence[Input] | None = None,
    answer: Sequence[object] | None = None,
    revision: str | None = None,
) -> ModelCard:
    """Generate the card of the adapter in a folder.

    Args:
        folder: Folder of the saved adapter. The card shows the PNG files in it.
        repo_id: The adapter's name on the Hub. None: not known yet; the card is called after the folder or the run.
        base_model: The base model's name on the Hub. Default: the name that the adapter records. A folder that it
            records is not shown.
        results: `results.json` of a run, or of one run per seed, as files or mappings. Default: that of the run that
            has saved the adapter; see `find_results`.
        metadata: Further metadata, such as `license`, `language` and `tags`.
        example: An input or a list of inputs for the snippet.
        answer: The adapter's prediction for each input.
        revision: The base model's commit. Default: the one that the adapter records, if that is of this base model.

    Raises:
        AdapterError: The folder does not contain a usable adapter, or the results cannot be read.
        ValueError: The name or the metadata break a rule of the Hub; see `check_metadata`.
    """
    if repo_id is not None and not is_repo_id(repo_id):
        raise ValueError(f"The adapter's name must be one that the Hub accepts, user/name; got {repo_id!r}.")
    config = read_config(folder)
    base = base_model or find_base_name(config)
    config.revision = revision or (config.revision if base == config.base_model_name_or_path else None)
    sizes = check_weights(folder, config)
    task, facts = find_task(config), read_facts(config)
    found = find_results(folder) if results is None else None
    # Not of several labels for a text, nor of the tags of its words.
    is_choice = config.kind_of_problem != "multi_label_classification" and (
        task is None or task.pipeline != "token-classification"
    )
    classes = facts.labels if is_choice else []
    name = repo_id.rpartition("/")[2] if repo_id else (found or folder / CARD_FILE).resolve().parent.name
    runs = read_runs(results or found)
    own = select_method(runs, "houlsby")
    run: TrainingRun = own[0] if own else {}
    widget = make_widget(task, example, answer)
    data = make_metadata(name, base, task, own, {"widget": widget, **(metadata or {})})
    changed, unchanged = hyperparameter_tables(run)
    file_bytes = (folder / SAFETENSORS_WEIGHTS_NAME).stat().st_size
    body = _load_template().render(
        name=name,
        repo_id=repo_id or (f"user/{name}" if is_repo_id(f"user/{name}") else "user/adapter"),
        is_named=repo_id is not None,
        source=find_source(),
        base_model=base,
        model_type=facts.base_config.get("model_type"),
        summary=_summarize(classes, sizes, own),
        auto_class=task.auto_class if task else None,
        reads_text=bool(task and task.reads_text),
        num_labels=len(facts.labels),
        example=None if example is None else Markdown(_format_example(example)),
        answer=answer,
        adapter=adapter_rows(config, sizes, file_bytes, run.get("total_parameters")),
        base=base_rows(config, base or _UNKNOWN_BASE),
        split=run.get("dataset", {}).get("split"),
        seeds=[item.get("seed", number) for number, item in enumerate(own, 1)],
        scores=score_table(runs),
        test=table_of_test_scores(run),
        figures=sorted(path.name for path in folder.glob("*.png")),
        data=data_rows(run),
        changed=changed,
        unchanged=unchanged,
        log=log_table(run),
        environment=environment_rows(run),
        limits=_list_limits(classes, own),
        command=run.get("command"),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{mark(body)}")


def find_task(config: HoulsbyConfig) -> Task | None:
    """Return an adapter's task; None for a model that is no task model of transformers."""
    try:
        return task_of_config(config)
    except AdapterError:
        return None


class Facts(NamedTuple):
    """What an adapter's configuration records about its head and its base model."""

    labels: list[str]
    base_config: dict[str, Any]
    base_weights: list[float]


def read_facts(config: HoulsbyConfig) -> Facts:
    """Read the recorded facts. No other function of this package knows where a configuration keeps them."""
    fingerprint = (config.record.base if config.record else None) or {}
    return Facts(
        labels=list((config.labels or {}).values()),
        base_config=fingerprint.get("config", {}),
        base_weights=next(filter(None, fingerprint.get("weights", [])), []),
    )


def count_parameters(sizes: Mapping[str, int]) -> dict[str, int]:
    """Count the parameters of each kind in an adapter's file.

    Args:
        sizes: The number of parameters of each tensor in the file, by name.
    """
    parts = {
        "invertible module": (".houlsby_adapter.F.", ".houlsby_adapter.G."),
        "bottlenecks": (".houlsby_adapter.",),
        "layer norms": (".houlsby_norm.",),
        "tokens": (".token_adapter.",),
    }
    counts = {"bottlenecks": 0, "invertible module": 0, "layer norms": 0, "tokens": 0, "head": 0}
    for key, size in sizes.items():
        kind = next((kind for kind, names in parts.items() if any(name in key for name in names)), "head")
        counts[kind] += size
    return {kind: size for kind, size in counts.items() if size}


def adapter_rows(config: HoulsbyConfig, sizes: Mapping[str, int], file_bytes: int, total: int | None) -> Rows:
    """Describe an adapter, as pairs of a name and a text.

    Args:
        config: The adapter's configuration.
        sizes: The number of parameters of each tensor in the adapter's file, by name.
        file_bytes: Size of the file.
        total: Number of parameters of the adapted model, if known.
    """
    counts, trained = count_parameters(sizes), sum(sizes.values())
    bottlenecks = sum(key.endswith(".houlsby_adapter.down_proj.weight") for key in sizes)
    sharing = {0: "one for each position", 1: "one for each layer"}
    shared = sharing.get(config.share_layers, f"one for each {config.share_layers} consecutive layers")
    exceptions = f", except {config.rank_pattern}" if config.rank_pattern else ""
    norms = {True: "trained in the adapted layers", False: "frozen", "all": "trained in the whole model"}
    return drop_empty(
        [
            (Markdown("bottleneck size `r`", "bottleneck size r"), f"{config.r}{exceptions}"),
            ("non-linearity", config.activation),
            ("bottlenecks", f"{bottlenecks}: {shared}"),
            ("kind", "" if config.kind == "houlsby" else config.kind),
            ("scaling", "" if config.scaling == 1 else str(config.scaling)),
            ("invertible module", config.invertible or ""),
            ("positions", _enumerate(config.target_modules or [name.replace("_", "-") for name in config.positions])),
            ("layers", "all" if config.layers_to_transform is None else _enumerate(config.layers_to_transform)),
            ("layer norms", norms[config.train_layer_norm]),
            ("trained parameters", f"{trained:,} ({', '.join(f'{kind} {size:,}' for kind, size in counts.items())})"),
            ("share of the model", f"{trained / total:.2%} of {total:,} parameters" if total else ""),
            ("file", f"{file_bytes / 1e6:.1f} MB" if file_bytes >= 1e5 else f"{file_bytes / 1e3:.1f} kB"),
            ("classes", _enumerate(read_facts(config).labels)),
        ]
    )


def base_rows(config: HoulsbyConfig, base_model: str) -> Rows:
    """Describe the base model and what identifies it, as pairs of a name and a text."""
    facts = read_facts(config)
    base_config = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.base_config.items())
    return drop_empty(
        [
            (
                "name",
                link(base_model, f"https://huggingface.co/{base_model}") if is_repo_id(base_model) else base_model,
            ),
            ("revision", code(config.revision) if config.revision else ""),
            ("configuration", base_config),
            ("first weights of the fingerprint", ", ".join(f"{value:g}" for value in facts.base_weights[:4])),
        ]
    )


def find_base_name(config: HoulsbyConfig) -> str | None:
    """Return the base model's name on the Hub that an adapter records; None if it records a folder or nothing."""
    name = str(config.base_model_name_or_path or "")
    return name if is_repo_id(name) and not Path(name).is_dir() else None


def find_source() -> str | None:
    """Return the address of this package's repository, which the package's metadata (setup.cfg) state in one place."""
    urls = read_metadata("houlsby-peft").get_all("Project-URL") or []
    return next((address for name, _, address in (url.partition(", ") for url in urls) if name == "Source"), None)


def _summarize(classes: Sequence[str], sizes: Mapping[str, int], runs: Sequence[TrainingRun]) -> str:
    """Continue the sentence "an adapter for ...": data, classes that exclude each other, size and main score."""
    run: TrainingRun = runs[0] if runs else {}
    dataset, total, trained = run.get("dataset", {}), run.get("total_parameters"), sum(sizes.values())
    scores = get_scores(run)
    parts = [
        f"trained on {dataset['name']}" if "name" in dataset else "trained",
        f"to tell {', '.join(classes[:-1])} and {classes[-1]} apart" if 1 < len(classes) <= 6 else "",
        f"with {trained / total:.1%} of the model's parameters" if total else f"with {trained:,} parameters",
    ]
    text = " ".join(part for part in parts if part)
    if not scores:
        return text
    main = run["chosen_by"] if run.get("chosen_by") in scores else next(iter(scores))
    return f"{text}: {readable_name(main)} {format_mean(collect_scores(runs, main))}"


def _list_limits(classes: Sequence[str], runs: Sequence[TrainingRun]) -> list[str]:
    """State what the scores do not show, as far as it follows from how they were measured."""
    if not runs:
        return []
    run = runs[0]
    language, length = run.get("dataset", {}).get("language"), run.get("arguments", {}).get("max_length")
    limits = []
    if run.get("best_epoch") is not None:
        score = readable_name(str(run.get("chosen_by", "score")))
        limits.append(
            f"The results above are for the epoch with the best {score} on the same data, so they are "
            "slightly optimistic."
        )
    if len(runs) == 1 and get_scores(run):
        limits.append("There is only one run, so it is unknown how much the scores vary with the seed.")
    if language:
        limits.append(f"The adapter was trained and evaluated on a single data set, in the language {language!r}.")
    if length:
        limits.append(f"Texts were truncated to {length} tokens in training and evaluation.")
    if len(classes) > 1:
        limits.append("The adapter always chooses one of its classes, even for texts that belong to none of them.")
    return limits


@functools.cache
def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        finalize=escape,  # every value that the template writes, unless it is Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": Markdown, "cell": cell, "code": code, "link": link, "block": block}
    return environment.from_string((files("houlsby_peft.hub_cards") / _TEMPLATE).read_text(encoding="utf-8"))


def _format_example(example: Input | Sequence[Input]) -> str:
    """Write an example as Python, with each of several texts on its own line."""
    if isinstance(example, str):
        return json.dumps(example, ensure_ascii=False)
    first, last = "()" if isinstance(example, tuple) else "[]"
    items = (_format_example(item).replace("\n", "\n    ") for item in example)
    return "\n".join([first, *(f"    {item}," for item in items), last])


def _enumerate(value: Any) -> str:
    items = as_list(value)
    more = f" and {len(items) - _MOST_ITEMS} more" if len(items) > _MOST_ITEMS else ""
    return ", ".join(map(str, items[:_MOST_ITEMS])) + more
