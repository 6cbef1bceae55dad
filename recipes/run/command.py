"""A command line: how it is read, and what a recipe makes of it for each of its tasks."""

import copy
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from transformers import HfArgumentParser

from run.arguments import MINILM, MINILM_SETTINGS, AdapterArguments, MethodArguments
from run.training_arguments import RecipeTrainingArguments


TASK = "{task}"
MAY_NAME_TASK = (
    "output_dir",
    "model_name",
    "evaluate",
    "init_adapter",
    "beneath",
    "hub_model_id",
    "data",
)

Defaults = Callable[[Namespace], Mapping[str, Any]]


class Command(NamedTuple):
    """A command line in groups: the task with its data and encoder, the method, the adapter, the
    training. Nothing in it changes: other values make another command.
    """

    arguments: Any
    method: MethodArguments
    adapter: AdapterArguments
    training: RecipeTrainingArguments

    @property
    def trains_ladder(self) -> bool:
        """Whether the adapter is a ladder, which leaves the encoder's hidden states as they are."""
        return self.method.method == "houlsby" and bool(self.adapter.kind == "ladder")

    def with_arguments(self, **values: Any) -> "Command":
        """Return a copy with other values, in every group that has arguments of these names."""
        groups: list[Any] = []
        for group in self:
            changed = copy.copy(group)
            for name, value in values.items():
                if hasattr(group, name):
                    vars(changed)[name] = value
            groups.append(changed)
        return Command(*groups)

    def of_several(self) -> "Command":
        """Return the command of several tasks, each with a folder and a repository of its own."""
        folder, repository = self.training.output_dir, self.training.hub_model_id
        if TASK not in folder:
            folder += f"/{TASK}"
        if repository is not None and TASK not in repository:
            repository += f"-{TASK}"
        return self.with_arguments(output_dir=folder, hub_model_id=repository)

    def for_task(self, name: str) -> "Command":
        """Return the command of one task, whose name replaces {task}."""
        values: dict[str, str] = {"task": name}
        for group in self:
            for argument in MAY_NAME_TASK:
                value = getattr(group, argument, None)
                if isinstance(value, str):
                    values[argument] = value.replace(TASK, name)
        return self.with_arguments(**values)


def parse_command(
    kind: type,
    adapter: type[AdapterArguments] = AdapterArguments,
    args: Sequence[str] | None = None,
    more_defaults: Defaults | None = None,
) -> Command:
    """Parse the command line, or `args`: `kind` is the recipe's own group. The first argument may
    be a JSON or YAML file of arguments, which flags after it override.

    Defaults that depend on flags are resolved before the dataclasses are made. The recipe's own,
    such as a preset's, are stronger than resolve_defaults'.
    """
    groups: Any = (kind, MethodArguments, adapter, RecipeTrainingArguments)
    parser = HfArgumentParser(
        groups, usage="accelerate launch recipes/%(prog)s [flags]", allow_abbrev=False
    )
    words = list(sys.argv[1:] if args is None else args)
    if words and Path(words[0]).suffix in (".json", ".yaml", ".yml"):
        words[:1] = read_arguments(Path(words[0]))
    of_recipe: Mapping[str, Any] = {}
    if more_defaults is not None:
        of_recipe = more_defaults(parser.parse_known_args(words)[0])
        parser.set_defaults(**of_recipe)
    for name, value in resolve_defaults(parser.parse_known_args(words)[0]).items():
        if name not in of_recipe or value is None:
            parser.set_defaults(**{name: value})
    *parsed, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return Command(*parsed)


def resolve_defaults(flags: Namespace) -> dict[str, Any]:
    """Return the defaults that follow from other flags, for the flags that the command line leaves
    out.
    """
    values = vars(flags)
    defaults: dict[str, Any] = {}
    if values.get("save_strategy") == "steps" and values.get("load_best_model_at_end") is not False:
        # A checkpoint of each evaluation.
        defaults["save_steps"] = flags.eval_steps or flags.logging_steps
    if values.get("do_predict") and "predict" in values:
        defaults["predict"] = True
    only_scores = values.get("do_eval") or values.get("do_predict")
    trains = values.get("do_train", True) or not only_scores
    if values.get("evaluate") is not None or not trains:
        # What is evaluated knows these.
        for name in ("model_name", "max_length", "null_threshold"):
            if name in values:
                defaults[name] = None
    elif values.get("model_name") == MINILM and "train_pooler" in values:
        defaults |= MINILM_SETTINGS.get(values.get("method", "houlsby"), {})
    return defaults


def read_arguments(path: Path) -> list[str]:
    """Return the words of a command line that stand for a JSON or YAML file, an object with a value
    for each flag.
    """
    text = path.read_text(encoding="utf-8")
    # The flags' types read the values, so that "no" is no boolean, and 1e-3 is a number.
    values = yaml.load(text, yaml.BaseLoader)
    typed = yaml.safe_load(text)  # for objects
    words = []
    for name, value in values.items():
        if isinstance(value, list):
            words += [f"--{name}", *value]
        elif isinstance(value, dict):
            words.append(f"--{name}={json.dumps(typed[name])}")
        elif value not in ("", "null"):
            words.append(f"--{name}={value}")
    return words
