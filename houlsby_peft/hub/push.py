"""`push_to_hub`: a trained adapter with tokenizer, labels and card, to the Hub in one commit."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.hf_api import ModelInfo
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from ..checkpoints.untrusted import CONFIG_FILE, TOKENIZER_FILES, WEIGHTS_FILE, read_config
from ..config import HoulsbyConfig
from ..errors import AdapterError, HubError
from ..heads.tasks import record_head
from ..hub_errors import explained
from ..serving.predictor import Input
from .card_results import Results
from .cards import CARD_FILE, make_card, merge_cards
from .checks import base_on_hub, check_access
from .example import answer_of_folder, answer_of_model


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
    message: str = "Upload Houlsby adapter",
) -> str:
    """Push a trained adapter to the Hub, with a card, in one commit.

    A repository that exists is updated; what people have written into its card stays (see `card_sections`). Nothing
    but the adapter's safetensors file, JSON files of adapter and tokenizer, the card and PNG figures is uploaded.

    Args:
        adapter: a model, of which the active adapter is pushed, or the folder of a saved adapter.
        repo_id: "user/name", or "name" for the user of the token.
        tokenizer: to be saved beside the adapter of a model.
        base_model: the base model's name on the Hub; needed where it was loaded from a folder.
        results: for the card: results.json of a run, or of a run per seed, as files or mappings.
        example: for the card: an input or a list of them, for which the adapter is run to show what it gives.
        metadata: for the card: `license`, `language`, `tags` and so on.
        private: whether a new repository is private. One that exists stays as it is, but what is to be private is not
            pushed to a public one.
        token: with the right to write. Default: the one that `hf auth login` or HF_TOKEN has set.
        message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        AdapterError: The adapter is not usable, its base model is not on the Hub, or the Hub would refuse its card.
        HubError: The Hub refuses or cannot be reached. Nothing is half uploaded.

    Both name the folder that holds everything, and how to try again.
    """
    in_memory = isinstance(adapter, PeftModel)
    folder = _save(adapter, tokenizer) if isinstance(adapter, PeftModel) else Path(adapter).expanduser()
    options = {"--private": private, "--base-model": base_model, "--results": results}
    with _nothing_lost(["houlsby-peft", "push", str(folder), repo_id, *_flags(options)]):
        base = base_on_hub(base_model or read_config(folder).base_model_name_or_path or "", given=bool(base_model))
        _record_revision(folder, base)
        repo_id = check_access(repo_id, token)
        answer = None
        if isinstance(adapter, PeftModel) and example is not None:
            answer = answer_of_model(adapter, folder, tokenizer, example, token)
        elif example is not None:
            answer = answer_of_folder(folder, example, base_model, token)
        card = make_card(
            folder, repo_id, base_model=base, results=results, metadata=metadata, example=example, answer=answer
        )
        url = _upload(folder, repo_id, base, card, private, token, message)
    if in_memory:
        shutil.rmtree(folder)
    return url


def _upload(
    folder: Path, repo_id: str, base: str, card: ModelCard, private: bool | None, token: str | None, message: str
) -> str:
    """Write the card and commit all files at once, on top of what the card was merged with."""
    api = HfApi(token=token, library_name="houlsby_peft")
    with explained(repo_id):
        api.create_repo(repo_id, private=private, exist_ok=True)
        info = api.model_info(repo_id)
        _check_repository(info, private)
        old = [_card_on_hub(info, token), folder / CARD_FILE]
        merge_cards(card, [path for path in old if path is not None and path.is_file()]).save(folder / CARD_FILE)
        commit = api.create_commit(repo_id, _files(folder, base), commit_message=message, parent_commit=info.sha)
    return str(commit.commit_url)


@contextmanager
def _nothing_lost(command: Sequence[str]) -> Iterator[None]:
    """Say with every error where the adapter is and how to push it again, as the process may end with the error."""
    try:
        yield
    except (AdapterError, HubError, ValueError) as error:
        kind = HubError if isinstance(error, HubError) else AdapterError
        raise kind(f"{error} Nothing is lost: all is in {command[2]}. To try again: {shlex.join(command)}") from error


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Arguments of `push_to_hub` as flags of the command, as far as they can be written there."""
    flags = []
    for flag, value in options.items():
        values = [value] if isinstance(value, (str, os.PathLike)) else value
        if value is True:
            flags.append(flag)
        elif isinstance(values, Sequence) and all(isinstance(each, (str, os.PathLike)) for each in values):
            flags += [flag, *map(str, values)]
    return flags


def _save(model: PeftModel, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """Save the active adapter to a new folder, with what its head predicts."""
    names = model.active_adapters
    config = model.peft_config[names[0]] if len(names) == 1 else None
    if not isinstance(config, HoulsbyConfig):
        raise AdapterError(f"One Houlsby adapter must be active to be pushed; active are {names}. Use set_adapter.")
    record_head(config, model.get_base_model())
    folder = Path(tempfile.mkdtemp(prefix="houlsby_peft-"))
    model.save_pretrained(str(folder), selected_adapters=names)
    inner = folder / names[0]
    if inner.is_dir():  # where PEFT puts every adapter that is not called "default"
        for path in inner.iterdir():
            path.rename(folder / path.name)
        inner.rmdir()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _record_revision(folder: Path, base: str) -> None:
    """Record the commit of the base model that is in the cache, from which it was loaded, unless one is recorded."""
    path = folder / CONFIG_FILE
    fields = json.loads(path.read_text(encoding="utf-8"))
    cached = try_to_load_from_cache(base, "config.json", revision=fields.get("revision"))
    if isinstance(cached, str) and fields.get("base_model_name_or_path") == base:
        fields["revision"] = Path(cached).parent.name
        path.write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")


def _check_repository(info: ModelInfo, private: bool | None) -> None:
    if private and not info.private:
        raise HubError(
            f"{info.id} exists and is public; an adapter that is to be private is not pushed to it. Make it private "
            f"at {constants.ENDPOINT}/{info.id}/settings, or give another name."
        )
    if any(file.rfilename == "config.json" for file in info.siblings or []):
        raise HubError(f"{info.id} holds a whole model (config.json); give the adapter a repository of its own.")


def _card_on_hub(info: ModelInfo, token: str | None) -> Path | None:
    if not any(file.rfilename == CARD_FILE for file in info.siblings or []):
        return None
    return Path(hf_hub_download(info.id, CARD_FILE, revision=info.sha, token=token))


def _files(folder: Path, base: str) -> list[CommitOperationAdd]:
    """What is uploaded; in the configuration, the base model's name on the Hub instead of a folder of this machine."""
    names = [WEIGHTS_FILE, CARD_FILE, *TOKENIZER_FILES, *(path.name for path in sorted(folder.glob("*.png")))]
    if not (folder / TOKENIZER_FILES[0]).is_file():
        names = [name for name in names if name not in TOKENIZER_FILES]
    fields = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    config = json.dumps(fields, indent=2, sort_keys=True).encode()
    files = [CommitOperationAdd(name, folder / name) for name in names if (folder / name).is_file()]
    return [CommitOperationAdd(CONFIG_FILE, config), *files]
