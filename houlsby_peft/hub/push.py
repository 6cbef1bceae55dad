"""`push_to_hub` and what surrounds it: the checks before a push, and the plan that a recipe makes
before training.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelInfo,
    constants,
)
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from transformers import PreTrainedTokenizerBase

from ..beneath import describe, open_beneath
from ..config import HoulsbyConfig
from ..errors import AdapterError, HubError
from ..predict.load import load_saved
from ..predict.questions import Input
from ..saved.adapter import TOKENIZER_FILES, SavedAdapter
from ..saved.downloads import explain_hub_errors, find_repo
from .card import CARD_FILE, find_base_on_hub, is_repo_id, keep_written, make_card, read_card
from .results import Results, read_report


if TYPE_CHECKING:
    from transformers import TrainingArguments


def push_to_hub(
    adapter: PeftModel | str | os.PathLike[str],
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base_model: str | None = None,
    beneath: str | None = None,
    results: Results | None = None,
    example: Input | Sequence[Input] | None = None,
    metadata: Mapping[str, Any] | None = None,
    private: bool | None = None,
    token: str | None = None,
    message: str = "Upload Houlsby adapter",
) -> str:
    """Push a trained adapter to the Hub with a generated card, in one commit.

    An existing repository is updated, and what people have written into its card is kept. Only the
    adapter's weights (safetensors), the JSON files of adapter and tokenizer, the card and PNG
    figures are uploaded. The tokenizer of an earlier push is deleted if this push has none.

    Args:
        adapter: A model, whose active adapter is pushed, or the folder of a saved adapter, which
            stays as it is.
        repo_id: "user/name", or "name" for the user of the token.
        tokenizer: Tokenizer to upload with the adapter of a model. Default: none; `load` uses the
            base model's.
        base_model: The base model's name on the Hub; needed if it was loaded from a folder.
        beneath: The name on the Hub of the adapter beneath a ladder; needed if it was loaded from a
            folder. It is pushed first.
        results: For the card: `results.json` of a run, or of one run per seed, as files or
            mappings.
        example: For the card: an input or a list of inputs. The card shows the predictions of the
            saved adapter for them, for which the base model is loaded once more.
        metadata: For the card: `license`, `language`, `tags` and so on.
        private: Whether to create a private repository. An existing one stays as it is, but a
            private push to a public repository is refused.
        token: Token with write access. Default: the one set by `hf auth login` or HF_TOKEN.
        message: Commit message.

    Returns:
        The URL of the commit.

    Raises:
        AdapterError: The adapter is not usable, or its base model, or the adapter beneath it, is
            not on the Hub.
        HubError: The Hub refuses the push or cannot be reached, or the adapter of a model is not
            pushed for another reason; it is then saved in a folder that the message names. No file
            is uploaded then.
        ValueError: The Hub refuses the metadata.
    """
    repo_id = check_access(repo_id, token)
    if not isinstance(adapter, PeftModel):
        folder = Path(adapter).expanduser()
    else:
        folder = _save(adapter, tokenizer)
    try:
        saved = SavedAdapter.open(folder)
        saved.weights  # checked before anything is uploaded  # noqa: B018
        base, revision = find_base_on_hub(saved.config, base_model)
        saved = _name_beneath(saved, beneath, token)
        report = read_report(saved.folder, results)
        answer = None if example is None else predict_example(saved, example, base_model, token)
        card = make_card(
            saved,
            report,
            repo_id,
            base_model=base,
            metadata=metadata,
            example=example,
            answer=answer,
            figures=[path.name for path in report.figures],
        )
        files = _files_to_upload(saved, base, revision)
        files |= {path.name: path for path in report.figures}
        with explain_hub_errors(repo_id):
            api = HfApi(token=token, library_name="houlsby_peft")
            url = _upload(api, repo_id, files, card, saved, private, message)
    except (ValueError, OSError) as error:
        if not isinstance(adapter, PeftModel):
            raise
        raise HubError(
            f"{error} The adapter is saved in {folder}; push this folder to try again."
        ) from error
    if isinstance(adapter, PeftModel):
        shutil.rmtree(folder)
    return url


def plan_push(
    training: TrainingArguments, base_model: str, beneath: str | None = None
) -> Callable[..., str] | None:
    """Take `--push_to_hub`, `--hub_model_id`, `--hub_private_repo` and `--hub_token` over from the
    Trainer.

    The Trainer would push every checkpoint with a card of its own. Call this in every process
    before the training, so that an invalid name or token is found before it.

    Args:
        training: The arguments; `push_to_hub` is set to False.
        base_model: The base model's name on the Hub, or a folder that `houlsby_peft.load` finds on
            other machines.
        beneath: The name on the Hub of the adapter beneath a ladder.

    Returns:
        None if nothing is to be pushed. Otherwise `push_to_hub` with `repo_id`, `base_model`,
        `private` and `token` filled in. Call it in the main process with the folder of the saved
        adapter, and any `results` and `example`.

    Raises:
        AdapterError: The base model, or the adapter beneath a ladder, is a folder, which others do
            not have.
        HubError: The name or the token is invalid, or the Hub cannot be reached.
    """
    if not training.push_to_hub:
        return None
    training.push_to_hub = False
    base, _ = find_base_on_hub(HoulsbyConfig(base_model_name_or_path=base_model))
    if beneath is not None:
        _check_beneath(beneath)
    name = training.hub_model_id or Path(training.output_dir or os.curdir).resolve().name
    if training.process_index == 0:
        name = check_access(name, training.hub_token)
    private = training.hub_private_repo or None
    return partial(
        push_to_hub, repo_id=name, base_model=base, private=private, token=training.hub_token
    )


def check_access(repo_id: str, token: str | None = None) -> str:
    """Return the name of a repository with its user, "user/name", if its name and the token are
    valid. Whether this token may write there, the Hub says at the push.
    """
    with explain_hub_errors(repo_id):
        validate_repo_id(repo_id)
        user = HfApi(token=token).whoami()
    authentication = user.get("auth") or {}
    if (authentication.get("accessToken") or {}).get("role") == "read":
        raise HubError(
            f"{repo_id}: the token is read-only; create one with write access: "
            f"{constants.ENDPOINT}/settings/tokens."
        )
    if "/" in repo_id:
        return repo_id
    return f"{user['name']}/{repo_id}"


def _name_beneath(saved: SavedAdapter, name: str | None, token: str | None) -> SavedAdapter:
    """Return a ladder that names the adapter beneath it as others find it: on the Hub, at the
    commit that holds the one that it was trained on. Any other adapter is returned as it is.
    """
    record, name_in_file = saved.record, saved.config.beneath
    if name_in_file is None or record.beneath is None:
        if name is not None:
            raise AdapterError(
                f"beneath names the adapter beneath a ladder; got {name!r} for an adapter that was "
                "trained on the base model alone. Leave it out."
            )
        return saved
    repo = find_repo(name_in_file)
    name_on_hub = name or (repo[0] if repo else name_in_file)
    _check_beneath(name_on_hub)
    if name is not None:  # whose commits are others
        record = replace(record, beneath={"sha256": record.beneath["sha256"]})
    config = saved.config.derived(record, beneath=name_on_hub)
    opened = open_beneath(config, token)
    if opened is not None:
        record = replace(record, beneath=describe(opened))
    return replace(saved, config=config, record=record)


def _check_beneath(name: str) -> None:
    if not is_repo_id(name) or Path(name).is_dir():
        raise AdapterError(
            "The adapter beneath a ladder must be on the Hub so that others can find it; got the "
            f"folder {name!r}. Push it first, and give its name on the Hub as beneath."
        )


def predict_example(
    saved: SavedAdapter,
    example: Input | Sequence[Input],
    base_model: str | None = None,
    token: str | None = None,
) -> list[Any]:
    """Return a saved adapter's predictions for the example of its card.

    A folder of the base model that still exists comes before its name on the Hub.
    """
    if Path(saved.config.base_model_name_or_path or "").is_dir():
        base_model = None
    return load_saved(saved, base_model, token=token).predict(example)


def _save(model: PeftModel, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """Save the active adapter to a new folder."""
    names = model.active_adapters
    if len(names) != 1 or not isinstance(model.peft_config[names[0]], HoulsbyConfig):
        raise AdapterError(
            f"Exactly one Houlsby adapter must be active to be pushed; the active ones are "
            f"{names}. Use set_adapter."
        )
    folder = Path(tempfile.mkdtemp(prefix="houlsby_peft-"))
    model.save_pretrained(str(folder), selected_adapters=names)
    inner = folder / names[0]
    if inner.is_dir():  # PEFT's place for every adapter that is not called "default"
        shutil.copytree(inner, folder, dirs_exist_ok=True)
        shutil.rmtree(inner)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _files_to_upload(
    saved: SavedAdapter, base_model: str, revision: str | None
) -> dict[str, Path | bytes]:
    """Return the adapter's files by name. The configuration names what it needs on the Hub."""
    fields = json.loads((saved.folder / CONFIG_NAME).read_text(encoding="utf-8"))
    fields |= {"base_model_name_or_path": base_model, "revision": revision}
    if saved.config.beneath is not None:
        fields["beneath"] = saved.config.beneath
        fields["recorded"]["beneath"] = saved.record.beneath
    names = [SAFETENSORS_WEIGHTS_NAME]
    if saved.own_tokenizer:
        names += TOKENIZER_FILES
    files: dict[str, Path | bytes] = {
        CONFIG_NAME: json.dumps(fields, indent=2, sort_keys=True).encode()
    }
    for name in names:
        if (saved.folder / name).is_file():
            files[name] = saved.folder / name
    return files


def _upload(
    api: HfApi,
    repo_id: str,
    files: Mapping[str, Path | bytes],
    card: ModelCard,
    saved: SavedAdapter,
    private: bool | None,
    message: str,
) -> str:
    """Upload files in one commit, with a card that keeps what people have written; create a new
    repository last.
    """
    try:
        repository = api.model_info(repo_id)
    except RepositoryNotFoundError:
        repository = None
    files_there = _check_repository(repository, repo_id, private)
    older = read_card(saved.folder)
    if repository and CARD_FILE in files_there:
        page = Path(api.hf_hub_download(repo_id, CARD_FILE, revision=repository.sha))
        older.append(page.read_text(encoding="utf-8"))
    card = keep_written(card, older)
    card.validate()
    if repository is None:
        api.create_repo(repo_id, private=private)
        repository = api.model_info(repo_id)
    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    for name, content in files.items():
        operations.append(CommitOperationAdd(name, content))
    operations.append(CommitOperationAdd(CARD_FILE, str(card).encode()))
    for name in TOKENIZER_FILES:
        # Of an earlier push. `load` would read the texts with it, perhaps for another base model.
        if name in files_there and name not in files:
            operations.append(CommitOperationDelete(name))
    # The parent is what the card was merged with.
    commit = api.create_commit(
        repo_id, operations, commit_message=message, parent_commit=repository.sha
    )
    return str(commit.commit_url)


def _check_repository(
    repository: ModelInfo | None, repo_id: str, private: bool | None
) -> list[str]:
    """Refuse a repository that a push would make public or break; return the names of its files."""
    if repository is None:
        return []
    names = [file.rfilename for file in repository.siblings or []]
    if private and not repository.private:
        raise HubError(
            f"{repo_id} is public, so a private push to it is refused. Make it private at "
            f"{constants.ENDPOINT}/{repo_id}/settings, or choose another name."
        )
    if "config.json" in names:
        raise HubError(
            f"{repo_id} contains a whole model (config.json). Push to a repository of its own."
        )
    return names
