"""`push_to_hub` and what surrounds it: the checks before a push, and the plan that a recipe makes before training."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    constants,
    hf_hub_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from transformers import PreTrainedTokenizerBase

from ..checkpoints.untrusted import TOKENIZER_FILES, read_config
from ..config import HoulsbyConfig
from ..errors import TOKENS_PAGE, AdapterError, HubError, check_kind, explain_hub_errors
from ..heads.tasks import task_of_config
from ..serving.base_model import load_base, load_tokenizer
from ..serving.load import load
from ..serving.predictor import Input, Predictor, check_inputs
from .card import CARD_FILE, make_card
from .merging import merge_with_hub, save_card
from .metadata import as_inputs, is_repo_id
from .results import Results


if TYPE_CHECKING:
    from transformers import TrainingArguments

_MESSAGE = "Upload Houlsby adapter"


def push_to_hub(
    adapter: PeftModel | str | os.PathLike[str],
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base_model: str | None = None,
    results: Results | None = None,
    example: Input | Sequence[Input] | None = None,
    metadata: Mapping[str, Any] | None = None,
    private: bool | None = None,
    token: str | None = None,
    message: str = _MESSAGE,
) -> str:
    """Push a trained adapter to the Hub with a generated card, in one commit.

    An existing repository is updated, and what people have written into its card is kept. Only the adapter's weights
    (safetensors), the JSON files of adapter and tokenizer, the card and PNG figures are uploaded. The tokenizer of an
    earlier push is deleted if this push has none.

    Args:
        adapter: A model, whose active adapter is pushed, or the folder of a saved adapter.
        repo_id: "user/name", or "name" for the user of the token.
        tokenizer: Tokenizer to upload with the adapter of a model. Default: none; `load` uses the base model's.
        base_model: The base model's name on the Hub; needed if it was loaded from a folder.
        results: For the card: `results.json` of a run, or of one run per seed, as files or mappings.
        example: For the card: an input or a list of inputs. The card shows the adapter's predictions for them.
        metadata: For the card: `license`, `language`, `tags` and so on.
        private: Whether to create a private repository. An existing one stays as it is, but a private push to a
            public repository is refused.
        token: Token with write access. Default: the one set by `hf auth login` or HF_TOKEN.
        message: Commit message.

    Returns:
        The URL of the commit.

    Raises:
        AdapterError: The adapter is not usable, its base model is not on the Hub, or its card breaks a rule.
        HubError: The Hub refuses the push or cannot be reached. No file is uploaded then.

    Both messages name the adapter's folder and the command to try again.
    """
    check_kind("adapter", adapter, (PeftModel, str, os.PathLike), "a PeftModel or the folder of a saved adapter")
    check_kind("repo_id", repo_id, str, "user/name, or name for the user of the token")
    check_kind("metadata", metadata, (Mapping, NoneType), "a mapping such as {'license': 'mit'}")
    kinds = (str, os.PathLike, Mapping, Sequence, NoneType)
    check_kind("results", results, kinds, "a results.json of a run, as a file or a mapping, or a list of them")
    check_inputs(as_inputs(example), "")
    folder = _save(adapter, tokenizer) if isinstance(adapter, PeftModel) else Path(adapter).expanduser()
    with _suggest_retry(folder, repo_id, private, base_model, results, example, metadata, message):
        files = _find_files(folder)
        recorded = read_config(folder).base_model_name_or_path or ""
        base = check_base(base_model or recorded, is_name=bool(base_model))
        config = _complete_config(folder, base)
        repo_id = check_access(repo_id, token)
        answer = None
        if isinstance(adapter, PeftModel) and example is not None:
            answer = _predict_in_memory(adapter, folder, tokenizer, example, token, config["revision"])
        elif example is not None:
            answer = predict_example(folder, example, base_model, token, config["revision"])
        card = make_card(
            folder,
            repo_id,
            base_model=base,
            results=results,
            metadata=metadata,
            example=example,
            answer=answer,
            revision=config["revision"],
        )
        operations = [
            CommitOperationAdd(CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True).encode()),
            *(CommitOperationAdd(path.name, path) for path in files),
        ]
        url = _upload(operations, folder / CARD_FILE, card, repo_id, private, token, message)
    if isinstance(adapter, PeftModel):
        shutil.rmtree(folder)
    return url


def plan_push(training: TrainingArguments, base_model: str) -> Callable[..., str] | None:
    """Take `--push_to_hub`, `--hub_model_id`, `--hub_private_repo` and `--hub_token` over from the Trainer.

    The Trainer would push every checkpoint with a card of its own. Call this in every process before the training, so
    that an invalid name or token is found before it.

    Args:
        training: The arguments; `push_to_hub` is set to False.
        base_model: The base model's name on the Hub.

    Returns:
        None if nothing is to be pushed. Otherwise `push_to_hub` with `repo_id`, `base_model`, `private` and `token`
        filled in. Call it in the main process with the folder of the saved adapter, and with `results` and `example`
        if there are any.

    Raises:
        AdapterError: The base model is a folder, which others do not have.
        HubError: The name or the token is invalid, or the Hub cannot be reached.
    """
    if not training.push_to_hub:
        return None
    training.push_to_hub = False
    name = training.hub_model_id or Path(training.output_dir or os.curdir).resolve().name
    base = check_base(base_model)
    if training.process_index == 0:
        name = check_access(name, training.hub_token)
    private = training.hub_private_repo or None
    return partial(push_to_hub, repo_id=name, base_model=base, private=private, token=training.hub_token)


def check_access(repo_id: str, token: str | None = None) -> str:
    """Check the name of a repository and a token.

    Returns:
        The name with its user: "user/name".

    Raises:
        HubError: The name is not allowed, the token is missing, invalid or read-only, or the Hub cannot be reached.
    """
    with explain_hub_errors(repo_id):
        validate_repo_id(repo_id)
        user = HfApi(token=token).whoami()
    if ((user.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise HubError(f"{repo_id}: the token is read-only; create one with write access: {TOKENS_PAGE}.")
    return repo_id if "/" in repo_id else f"{user['name']}/{repo_id}"


def check_base(name: str, is_name: bool = False) -> str:
    """Check that others can find a base model on the Hub, and return its name.

    Args:
        name: The base model's name, or the folder that it was loaded from.
        is_name: Whether it is certainly a name, even if there is a folder of that name.

    Raises:
        AdapterError: It is a folder, or not a name that the Hub accepts.
    """
    if not is_repo_id(name) or (not is_name and Path(name).is_dir()):
        raise AdapterError(
            f"The base model must be on the Hub so that others can find it; this one was loaded from {name!r}. Give "
            "its name on the Hub as base_model."
        )
    return name


def predict_example(
    folder: Path,
    example: Input | Sequence[Input],
    base_model: str | None = None,
    token: str | None = None,
    revision: str | None = None,
) -> list[Any]:
    """Return a saved adapter's predictions for the example of its card.

    Args:
        folder: Folder of the adapter.
        example: An input or a list of inputs.
        base_model: The base model's name on the Hub, used if the adapter does not record a folder that still exists.
        token: Token for private repositories.
        revision: The base model's commit. Default: the one that the adapter records.
    """
    config = read_config(folder)
    config.revision = revision or config.revision
    is_local = Path(config.base_model_name_or_path or "").is_dir()
    base = load_base(folder, config, None if is_local else base_model, token)
    return load(folder, base_model=base, token=token).predict(example)


def _predict_in_memory(
    model: PeftModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    example: Input | Sequence[Input],
    token: str | None,
    revision: str | None,
) -> list[Any]:
    """Return the predictions of a model's active adapter, without loading the base model a second time."""
    config, training = read_config(folder), model.training
    config.revision = revision
    tokenizer = tokenizer or load_tokenizer(folder, config, None, token)
    try:
        predictor = Predictor(model.eval(), model.active_adapters[0], task_of_config(config), tokenizer)
        return predictor.predict(example)
    finally:
        model.train(training)


def _save(model: PeftModel, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """Save the active adapter to a new folder, with a record of what its head predicts."""
    names = model.active_adapters
    config = model.peft_config[names[0]] if len(names) == 1 else None
    if not isinstance(config, HoulsbyConfig):
        raise AdapterError(
            f"Exactly one Houlsby adapter must be active to be pushed; the active ones are {names}. Use set_adapter."
        )
    folder = Path(tempfile.mkdtemp(prefix="houlsby_peft-"))
    model.save_pretrained(str(folder), selected_adapters=names)
    inner = folder / names[0]
    if inner.is_dir():  # PEFT's place for every adapter that is not called "default"
        for path in inner.iterdir():
            path.rename(folder / path.name)
        inner.rmdir()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def _suggest_retry(
    folder: Path,
    repo_id: str,
    private: bool | None,
    base_model: str | None,
    results: Results | None,
    example: Input | Sequence[Input] | None,
    metadata: Mapping[str, Any] | None,
    message: str,
) -> Iterator[None]:
    """Add to every error where the adapter is and the command that pushes it again, as the process may end with it.

    The command has all arguments but the token, which is secret.
    """
    try:
        yield
    except (AdapterError, HubError, ValueError) as error:
        runs = [results] if isinstance(results, (str, os.PathLike, Mapping)) else results or []
        inputs = as_inputs(example)
        pairs = any(not isinstance(item, str) for item in inputs)
        texts = [text for item in inputs for text in ([item] if isinstance(item, str) else item)]
        command = ["houlsby-peft", "push", str(folder), repo_id, *(["--private"] if private else [])]
        command += _flag("--base-model", [base_model] if base_model else [])
        command += _flag("--results", [_write_json(run) if isinstance(run, Mapping) else str(run) for run in runs])
        command += [*_flag("--example", texts), *(["--pairs"] if pairs else [])]
        command += _flag("--metadata", [json.dumps(dict(metadata), default=str)] if metadata else [])
        command += _flag("--message", [message] if message != _MESSAGE else [])
        kind = HubError if isinstance(error, HubError) else AdapterError
        raise kind(
            f"{error} The adapter's folder is {folder}. To try again: {' '.join(map(_quote, command))}"
        ) from error


def _flag(name: str, values: Sequence[str]) -> list[str]:
    if any(value.startswith("-") for value in values):  # would be taken for flags
        return [f"{name}={value}" for value in values]
    return [name, *values] if values else []


def _quote(argument: str) -> str:
    """Quote an argument for a shell on one line; bash and zsh read control characters in $'...'."""
    if argument.isprintable():
        return shlex.quote(argument)
    characters = (
        f"\\{c}" if c in "\\'" else c if c.isprintable() else c.encode("unicode_escape").decode() for c in argument
    )
    return f"$'{''.join(characters)}'"


def _write_json(run: Mapping[str, Any]) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="results-", delete=False, encoding="utf-8") as file:
        json.dump(run, file, default=str)
    return file.name


def _find_files(folder: Path) -> list[Path]:
    """Return the files that are uploaded, except for the configuration and the card.

    Raises:
        AdapterError: One of them is a symbolic link out of the folder, whose target nobody has asked to upload.
    """
    names = [SAFETENSORS_WEIGHTS_NAME, *(path.name for path in sorted(folder.glob("*.png")))]
    if (folder / TOKENIZER_FILES[0]).is_file():
        names += TOKENIZER_FILES
    for name in (CONFIG_NAME, CARD_FILE, *names):
        target = (folder / name).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise AdapterError(
                f"What is uploaded must be in the adapter's folder; {folder / name} is a symbolic link to {target}. "
                "Replace it with a copy, or remove it."
            )
    return [folder / name for name in names if (folder / name).is_file()]


def _complete_config(folder: Path, base: str) -> dict[str, Any]:
    """Return the fields of the configuration to upload: with the base model's name on the Hub instead of a local
    folder or another name, and with the commit from which it was loaded, if that is in the cache."""
    fields: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    revision = fields.get("revision")
    if fields.get("base_model_name_or_path") != base:
        revision = None  # a commit of another repository
    elif isinstance(cached := try_to_load_from_cache(base, "config.json", revision=revision), str):
        revision = Path(cached).parent.name
    return fields | {"base_model_name_or_path": base, "revision": revision}


def _upload(
    operations: Sequence[CommitOperationAdd],
    local_card: Path,
    card: ModelCard,
    repo_id: str,
    private: bool | None,
    token: str | None,
    message: str,
) -> str:
    """Merge and write the card, then commit it with the other files. A new repository is created last."""
    api = HfApi(token=token, library_name="houlsby_peft")
    with explain_hub_errors(repo_id):
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            info = None
        files: list[str] = []
        old_card = None
        if info is not None:
            files = [file.rfilename for file in info.siblings or []]
            if private and not info.private:
                raise HubError(
                    f"{repo_id} is public, so a private push to it is refused. Make it private at "
                    f"{constants.ENDPOINT}/{repo_id}/settings, or choose another name."
                )
            if "config.json" in files:
                raise HubError(
                    f"{repo_id} contains a whole model (config.json). Push the adapter to a repository of its own."
                )
            if CARD_FILE in files:
                old_card = Path(hf_hub_download(repo_id, CARD_FILE, revision=info.sha, token=token))
        merged = merge_with_hub(card, local_card, old_card, repo_id, token)
        save_card(merged, local_card, repo_id, info.sha if info and old_card else None)
        try:
            merged.validate()
        except ValueError as error:
            raise HubError(f"{repo_id}: the Hub refuses the card ({' '.join(str(error).split())}).") from error
        if info is None:
            api.create_repo(repo_id, private=private)
            info = api.model_info(repo_id)
        names = {operation.path_in_repo for operation in operations}
        # Of an earlier push. `load` would read the texts with it, perhaps for another base model.
        old_tokenizer = [name for name in TOKENIZER_FILES if name in files and name not in names]
        commit = api.create_commit(
            repo_id,
            [
                *operations,
                CommitOperationAdd(CARD_FILE, str(merged).encode()),
                *map(CommitOperationDelete, old_tokenizer),
            ],
            commit_message=message,
            parent_commit=info.sha,  # what the card was merged with
        )
        save_card(merged, local_card, repo_id, commit.oid)
    return str(commit.commit_url)
