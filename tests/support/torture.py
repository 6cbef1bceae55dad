"""Pass damaged adapter folders through every way that an adapter is used, and judge what comes of it.

    PYTHONPATH=tests/support python tests/support/torture.py --count 2000
    PYTHONPATH=tests/support python tests/support/torture.py --first 137 --count 1 --verbose

Each case must load with the outputs that its files ask for, which plain PyTorch computes here from the same files, or
be refused within two seconds in one line that names the file and the remedy. Neither may leave anything behind in a
model that is in use.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import re
import shutil
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.activations import ACT2FN

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig, HubError
from houlsby_peft.cli import main as command
from hub_models import BASE, LABELS, make_base
from local_hub import LocalHub
from mutated_adapters import CONFIG, WEIGHTS, Files, mutate
from tiny_models import perturb


TEXTS = ["The soup was late and cold.", "Is the menu in town?"]
QUESTION = ("When does the last train leave?", "The last train to the coast leaves late.")
# The adapters that are damaged: the head's class, and the fields of the configuration.
NAMES = dict(enumerate(LABELS))
ADAPTERS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (AutoModelForSequenceClassification, {"task_type": "SEQ_CLS", "id2label": NAMES}),
    (AutoModelForSequenceClassification, {"id2label": NAMES, "share_layers": 1, "two_layer_head": True}),
    (AutoModelForSequenceClassification, {"train_layer_norm": "all", "positions": ["attention"]}),
    (AutoModelForTokenClassification, {"id2label": NAMES, "train_layer_norm": False}),
    (AutoModelForQuestionAnswering, {"task_type": "QUESTION_ANS", "rank_pattern": {"attention.output.dropout": 2}}),
)  # fmt: skip
LIMIT = 2.0
# What is to be done, or which values are right.
_REMEDY = re.compile(
    r"\b(Save|save|Download|Check|Load|load|Give|give|Use|use|Leave|Choose|Correct|Train|Ask|Replace|Add|Set|Repair|Remove"
    r"|Name|delete|For example|The paper|None|True|False|PEFT fills|0 shares|An adapter follows)\b"
)


class Original:
    """A sound adapter, the model that it runs in, and what its file computes."""

    def __init__(self, number: int, base: Path, folder: Path) -> None:
        auto_class, options = ADAPTERS[number]
        labels = {} if auto_class is AutoModelForQuestionAnswering else {"num_labels": 3}
        torch.manual_seed(number)
        self.make_base: Callable[[], Any] = lambda: auto_class.from_pretrained(base, **labels)
        model = get_peft_model(self.make_base(), HoulsbyConfig(r=4, **options))
        perturb(model, number)
        model.save_pretrained(folder)
        config = json.loads((folder / CONFIG).read_text()) | {"base_model_name_or_path": BASE}
        (folder / CONFIG).write_text(json.dumps(config))
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        self.folder = folder
        self.files: Files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.shapes = {key: tensor.shape for key, tensor in load(self.files[WEIGHTS]).items()}
        self.is_text = auto_class is AutoModelForSequenceClassification
        self.is_answer = auto_class is AutoModelForQuestionAnswering
        self.inputs: Any = [QUESTION] if self.is_answer else TEXTS
        self._model = model.eval()
        # In use while others are added beside it.
        self.running = houlsby_peft.load(folder)
        self.bare = self.make_base().eval()

    def logits(self, files: Files, tokens: Any) -> torch.Tensor | None:
        """Return what the weights in these files compute, or None if they must be refused."""
        try:
            tensors = load(files[WEIGHTS])
            config = json.loads(files[CONFIG])
            activation = config.get("activation", "gelu")
            layer = ACT2FN[activation] if isinstance(activation, str) else None
        except Exception:
            return None
        if not isinstance(config, dict) or layer is None or not isinstance(config.get("scaling", 1.0), (int, float)):
            return None
        if any(key not in tensors or tensors[key].shape != shape for key, shape in self.shapes.items()):
            return None
        state = self._model.state_dict()
        with torch.no_grad():
            for key in self.shapes:
                tensor = tensors[key].float()
                if not tensors[key].is_floating_point() or not tensor.isfinite().all():
                    return None
                state[_name_in_model(key, state)].copy_(tensor)
            for module in self._model.modules():
                if hasattr(module, "activation_name"):
                    module.activation, module.scaling = layer, config.get("scaling", 1.0)
            outputs = self._model(**tokens)
        return outputs.start_logits if self.is_answer else outputs.logits


def _name_in_model(key: str, state: Iterable[str]) -> str:
    module, _, weight = key.partition(".houlsby_adapter.")
    if weight:
        return f"{module}.houlsby_adapter.default.{weight}"
    module, _, weight = key.partition(".houlsby_norm.")
    if weight:
        return f"{module}.houlsby_norm.default.{weight}"
    [name] = [n for n in state if n.replace(".modules_to_save.default", "") == key and "modules_to_save" in n]
    return name


def snapshot(model: Any) -> list[Any]:
    """Return all that must stay as it was in a model that is in use."""
    return [
        [(name, type(module), module.training) for name, module in model.named_modules()],
        [(name, weight.requires_grad, float(weight.float().sum())) for name, weight in model.named_parameters()],
        sorted(getattr(model, "peft_config", {})),
        sorted(getattr(getattr(model, "base_model", model), "houlsby_records", {})),
        str(getattr(model, "active_adapters", "")) if isinstance(model, PeftModel) else "",
    ]


class Case:
    """One damaged folder, in all ways.

    Attributes:
        outcomes: For each way "loaded" or the message of the refusal.
        problems: What must not be.
    """

    def __init__(self, number: int, originals: list[Original], folder: Path) -> None:
        self.number, self.original = number, originals[number % len(originals)]
        self.files, self.what = mutate(number, self.original.files)
        self.folder = folder / f"case-{number}"
        self.folder.mkdir()
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)
        self.outcomes: dict[str, str] = {}
        self.problems: list[str] = []
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        """Try every way."""
        original, running = self.original, self.original.running
        before, answers = snapshot(running.model), running.predict(original.inputs)
        self._try("load", self._load)
        self._try("load_adapter", self._load_adapter)
        if snapshot(running.model) != before or running.predict(original.inputs) != answers:
            self.problems.append("something is left in the model that is in use")
            original.running = houlsby_peft.load(original.folder)
        bare = copy.deepcopy(original.bare)
        before = snapshot(bare)
        self._try("from_pretrained", lambda: self._from_pretrained(bare))
        if self.outcomes["from_pretrained"] != "loaded" and snapshot(bare) != before:
            self.problems.append("something is left in the base model")
        if original.is_text:
            self._try("TaskBank", self._bank)
        self._try("info", lambda: self._command("info", str(self.folder)))
        texts = ["--pairs", *QUESTION] if original.is_answer else TEXTS
        self._try("predict", lambda: self._command("predict", str(self.folder), *texts))
        self._try("push", self._push)

    def _try(self, way: str, function: Callable[[], None]) -> None:
        start, wall = time.process_time(), time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function()
            self.outcomes[way] = "loaded"
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            self.outcomes[way] = f"{type(error).__name__}: {error}"
            self._judge(way, error)
        self.seconds[way] = time.process_time() - start
        if self.seconds[way] > LIMIT or time.perf_counter() - wall > 5 * LIMIT:
            self.problems.append(f"{way}: took {self.seconds[way]:.1f} s")

    def _judge(self, way: str, error: BaseException) -> None:
        message = str(error)
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        own = [name for name in frames if "houlsby_peft/" in name]
        if isinstance(error, AssertionError):
            self.problems.append(f"{way}: {message}")
            return
        if way in ("from_pretrained", "load_adapter") and not own:
            return  # PEFT has read the file itself before it has asked this package
        kinds = (
            AdapterError,
            HubError,
            SystemExit,
            *((ValueError,) if way in ("from_pretrained", "load_adapter") else ()),
        )
        if not isinstance(error, kinds) or type(error).__name__ in ("JSONDecodeError", "UnicodeDecodeError"):
            trace = "".join(traceback.format_exception(error)[-3:])
            self.problems.append(f"{way}: {type(error).__name__}: {message[:300]} at {trace[-600:]}")
        if "\n" in message or "\r" in message or len(message) > 1500:
            self.problems.append(f"{way}: not one line of at most 1,500 characters: {message[:300]!r}")
        if not _REMEDY.search(message):
            self.problems.append(f"{way}: gives no remedy: {message[:300]}")
        names = (self.folder.name, *self.files, CONFIG, WEIGHTS, "tokenizer")
        if not any(name in message for name in names):
            self.problems.append(f"{way}: names no file: {message[:300]}")

    def _compare(self, model: Any, tokenizer: Any, **options: Any) -> None:
        """Compare the logits of a loaded adapter with those that its files ask for."""
        text = QUESTION if self.original.is_answer else TEXTS[0]
        tokens = dict(
            tokenizer(
                *([text] if isinstance(text, str) else text), truncation=True, max_length=64, return_tensors="pt"
            )
        )
        known = {"input_ids", "attention_mask", "token_type_ids"}
        if self.original.is_answer:  # PEFT's model for question answering ignores them, its model for no task does not
            known.remove("token_type_ids")
        tokens = {key: value for key, value in tokens.items() if key in known}
        with torch.no_grad():
            outputs = model(**tokens, **options)
        found = outputs.start_logits if self.original.is_answer else outputs.logits
        expected = self.original.logits(self.files, tokens)
        assert expected is not None, "loaded, but must be refused"
        close = torch.allclose(found.float(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert close, "other outputs than its files ask for"

    def _load(self) -> None:
        running = self.original.running
        adapter = houlsby_peft.load(self.folder, beside=running)
        try:
            results = adapter.predict(self.original.inputs)
            if self.original.is_text and adapter.config.kind_of_problem in (None, "single_label_classification"):
                assert all(result["label"] in adapter.labels for result in results), f"strange answers: {results}"
            self._compare(running.model, adapter.tokenizer, adapter_names=[adapter.name])
        finally:
            running.model.delete_adapter(adapter.name)

    def _load_adapter(self) -> None:
        model = self.original.running.model
        was_training = model.training
        try:
            model.load_adapter(str(self.folder), "second")
            model.eval()
            self._compare(model, self.original.running.tokenizer, adapter_names=["second"])
        finally:
            model.train(was_training)
            if "second" in model.peft_config:
                model.delete_adapter("second")

    def _from_pretrained(self, base: Any) -> None:
        model = PeftModel.from_pretrained(base, str(self.folder))
        self._compare(model.eval(), self.original.running.tokenizer)

    def _bank(self) -> None:
        bank = houlsby_peft.TaskBank(
            {"sound": self.original.folder, "damaged": self.folder}, base_model=copy.deepcopy(self.original.bare)
        )
        before = bank.predict([("sound", TEXTS[0])])
        model = next(iter(bank._held._first.values())).model
        shape = snapshot(model)
        try:
            found = bank.predict([("damaged", TEXTS[0]), ("sound", TEXTS[0])])
        except Exception:
            if bank.held == ("sound",):
                assert snapshot(model) == shape, "something is left in the bank's model"
            raise
        finally:
            after = bank.predict([("sound", TEXTS[0])])
            assert after == before, f"the bank's other task answers {after} instead of {before}"
        assert found[1]["label"] == before[0]["label"], "another answer in a batch with the damaged one"

    def _command(self, *arguments: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            command(arguments)
        lines = printed.getvalue().splitlines()
        assert lines, f"{arguments[0]} printed nothing"
        if arguments[0] == "info":
            assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e]", "".join(lines)), f"info printed {lines!r:.300}"

    def _push(self) -> None:
        houlsby_peft.push_to_hub(self.folder, f"user/{self.folder.name}", token="hf_write")


def run_cases(numbers: list[int], folder: str) -> list[list[Any]]:
    """Client of the local Hub: run cases; return each one's number, change, outcomes, problems and seconds."""
    torch.set_num_threads(1)
    place = Path(folder)
    base = make_base(place / "base")
    originals = [Original(number, base, place / f"original-{number}") for number in range(len(ADAPTERS))]
    found = []
    for number in numbers:
        case = Case(number, originals, place)
        case.run()
        found.append([number, case.what, case.outcomes, case.problems, case.seconds])
        shutil.rmtree(case.folder)
    return found


def torture(numbers: list[int]) -> list[list[Any]]:
    """Run cases as a client of a Hub of their own; a refused push must leave no repository there."""
    with LocalHub() as hub, tempfile.TemporaryDirectory() as folder:
        hub.add(BASE, make_base(Path(folder) / "base"))
        found = hub.call(run_cases, numbers, folder, home=Path(folder) / "home")
        for number, _, outcomes, problems, _ in found:
            repo = hub.store.repos.get(f"user/case-{number}")
            if repo is not None and outcomes["push"] != "loaded":
                problems.append(f"push: was refused and left a repository with {sorted(repo.head.files)}")
    return found


def main() -> None:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--verbose", action="store_true", help="print every outcome")
    options = parser.parse_args()
    start = time.perf_counter()
    found = torture(list(range(options.first, options.first + options.count)))
    if options.verbose:
        for number, what, outcomes, _, seconds in found:
            print(
                f"{number}: {what}",
                *(f"{way} ({seconds[way]:.2f} s): {said}" for way, said in outcomes.items()),
                sep="\n    ",
            )
    for number, what, _, problems, _ in found:
        for problem in problems:
            print(f"PROBLEM {number} ({what:.200}): {problem}")
    ways = Counter((way, said == "loaded") for _, _, outcomes, _, _ in found for way, said in outcomes.items())
    for way in dict.fromkeys(way for way, _ in ways):
        print(f"{way}: {ways[way, True]} loaded, {ways[way, False]} refused")
    slowest = max(max(seconds.values()) for *_, seconds in found)
    print(
        f"{len(found)} cases, {sum(bool(p) for *_, p, _ in found)} with problems, slowest {slowest:.2f} s, "
        f"{time.perf_counter() - start:.0f} s in all."
    )


if __name__ == "__main__":
    # Under its own name, by which the client process finds `run_cases`.
    __import__("torture").main()
