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
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from transformers import PreTrainedTokenizerBase

from ..config import HoulsbyConfig
from ..errors import AdapterError, HubError
from ..inference.adapter_files import TOKENIZER_FILES, read_config
from ..inference.base_model import load_tokenizer
from ..inference.load import load
from ..inference.predictor import Input, Predictor
from ..tasks import record_head, task_of_config
from .card import is_repo_id, make_card, merge_cards
from .errors import TOKENS_PAGE, explain_hub_errors
from .results import Results


if TYPE_CHECKING:
    from transformers import TrainingArguments

CARD_FILE = constants.REPOCARD_NAME


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
    """Push a trained adapter to the Hub with a generated card, in one commit.

    An existing repository is updated, and what people have written into its card is kept. Only the adapter's weights
    (safetensors), the JSON files of adapter and tokenizer, the card and PNG figures are uploaded.

    Args:
        adapter: A model, whose active adapter is pushed, or the folder of a saved adapter.
        repo_id: "user/name", or "name" for the user of the token.
        tokenizer: Tokenizer to upload with the adapter of a model.
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

    Both messages name the folder with the saved adapter and the command to try again.
    """
    in_memory = isinstance(adapter, PeftModel)
    folder = _save(adapter, tokenizer) if isinstance(adapter, PeftModel) else Path(adapter).expanduser()
    options = {"--private": private, "--base-model": base_model, "--results": results}
    with _suggest_retry(["houlsby-peft", "push", str(folder), repo_id, *_flags(options)]):
        base = check_base(base_model or read_config(folder).base_model_name_or_path or "", is_name=bool(base_model))
        _record_revision(folder, base)
        repo_id = check_access(repo_id, token)
        answer = None
        if isinstance(adapter, PeftModel) and example is not None:
            answer = _predict_in_memory(adapter, folder, tokenizer, example, token)
        elif example is not None:
            answer = predict_example(folder, example, base_model, token)
        card = make_card(
            folder, repo_id, base_model=base, results=results, metadata=metadata, example=example, answer=answer
        )
        url = _upload(folder, repo_id, base, card, private, token, message)
    if in_memory:
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
    folder: Path, example: Input | Sequence[Input], base_model: str | None = None, token: str | None = None
) -> list[Any]:
    """Return a saved adapter's predictions for the example of its card.

    Args:
        folder: Folder of the adapter.
        example: An input or a list of inputs.
        base_model: The base model's name on the Hub, used if the adapter does not record a folder that still exists.
        token: Token for private repositories.
    """
    recorded = Path(read_config(folder).base_model_name_or_path or "").is_dir()
    return load(folder, base_model=None if recorded else base_model, token=token).predict(example)


def _predict_in_memory(
    model: PeftModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    example: Input | Sequence[Input],
    token: str | None,
) -> list[Any]:
    """Return the predictions of a model's active adapter, without loading the base model a second time."""
    config, training = read_config(folder), model.training
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
    record_head(config, model.get_base_model())
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
def _suggest_retry(command: Sequence[str]) -> Iterator[None]:
    """Add to every error where the adapter is and how to push it again, as the process may end with the error."""
    try:
        yield
    except (AdapterError, HubError, ValueError) as error:
        kind = HubError if isinstance(error, HubError) else AdapterError
        raise kind(f"{error} The adapter is saved in {command[2]}. To try again: {shlex.join(command)}") from error


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


def _record_revision(folder: Path, base: str) -> None:
    """Record the commit of the base model that is in the cache, from which it was loaded, unless one is recorded."""
    path = folder / CONFIG_NAME
    fields = json.loads(path.read_text(encoding="utf-8"))
    cached = try_to_load_from_cache(base, "config.json", revision=fields.get("revision"))
    if isinstance(cached, str) and fields.get("base_model_name_or_path") == base:
        fields["revision"] = Path(cached).parent.name
        path.write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")


def _upload(
    folder: Path, repo_id: str, base: str, card: ModelCard, private: bool | None, token: str | None, message: str
) -> str:
    """Write the card and commit all files at once, on top of what the card was merged with."""
    api = HfApi(token=token, library_name="houlsby_peft")
    with explain_hub_errors(repo_id):
        api.create_repo(repo_id, private=private, exist_ok=True)
        info = api.model_info(repo_id)
        _check_repository(info, private)
        old = [_card_on_hub(info, token), folder / CARD_FILE]
        merge_cards(card, [path for path in old if path is not None and path.is_file()]).save(folder / CARD_FILE)
        commit = api.create_commit(repo_id, _files(folder, base), commit_message=message, parent_commit=info.sha)
    return str(commit.commit_url)


def _check_repository(info: ModelInfo, private: bool | None) -> None:
    if private and not info.private:
        raise HubError(
            f"{info.id} is public, so a private push to it is refused. Make it private at "
            f"{constants.ENDPOINT}/{info.id}/settings, or choose another name."
        )
    if any(file.rfilename == "config.json" for file in info.siblings or []):
        raise HubError(f"{info.id} contains a whole model (config.json). Push the adapter to a repository of its own.")


def _card_on_hub(info: ModelInfo, token: str | None) -> Path | None:
    if not any(file.rfilename == CARD_FILE for file in info.siblings or []):
        return None
    return Path(hf_hub_download(info.id, CARD_FILE, revision=info.sha, token=token))


def _files(folder: Path, base: str) -> list[CommitOperationAdd]:
    """Return what is uploaded; the configuration names the base model on the Hub instead of a local folder."""
    names = [
        SAFETENSORS_WEIGHTS_NAME,
        CARD_FILE,
        *TOKENIZER_FILES,
        *(path.name for path in sorted(folder.glob("*.png"))),
    ]
    if not (folder / TOKENIZER_FILES[0]).is_file():
        names = [name for name in names if name not in TOKENIZER_FILES]
    fields = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    config = json.dumps(fields, indent=2, sort_keys=True).encode()
    files = [CommitOperationAdd(name, folder / name) for name in names if (folder / name).is_file()]
    return [CommitOperationAdd(CONFIG_NAME, config), *files]
