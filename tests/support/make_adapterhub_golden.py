"""Write the golden set of AdapterHub folders, with the outputs of the `adapters` library in
float64.

Run it with adapters 1.3.0 in an environment of its own, because the library pins an older version
of transformers:

    python -m venv other && other/bin/pip install adapters==1.3.0
    other/bin/python tests/support/make_adapterhub_golden.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import adapters
import torch
import transformers
from adapters import AutoAdapterModel, BnConfig, DoubleSeqBnConfig, ParBnConfig, SeqBnConfig

from adapterhub_models import fill, inputs, tiny_base, tiny_config, whole_float64


GOLDEN = Path(__file__).resolve().parents[1] / "data" / "adapterhub"
EXPECTED = "expected.json"
MODELS = ("bert", "roberta", "distilbert", "xlmr", "bart", "gpt2", "t5")
NICE = {"inv_adapter": "nice", "inv_adapter_reduction_factor": 2}
ABC = {"a": 0, "b": 1, "c": 2}


def houlsby(**changes: Any) -> BnConfig:
    return DoubleSeqBnConfig(**{"reduction_factor": 8, **changes})


def pfeiffer(**changes: Any) -> BnConfig:
    return SeqBnConfig(**{"reduction_factor": 8, **changes})


def parallel(**changes: Any) -> BnConfig:
    return ParBnConfig(**{"reduction_factor": 8, **changes})


def with_head(config: BnConfig, kind: str, **options: Any) -> tuple[BnConfig, dict[str, Any]]:
    """A case with a flex head: the library's method that adds it, and its arguments."""
    return config, {"head": (f"add_{kind}_head", options)}


LABELS = {0: "a", 1: "b", 2: "c"}
# Name: (configuration, further facts). `head`: a flex head; `static`: a class of transformers whose
# head is saved; `class`: a language model whose head the outputs are from; `old`: the folder is
# rewritten as by an earlier version.
CASES: dict[str, tuple[BnConfig, dict[str, Any]]] = {
    **{f"{model}-houlsby": (houlsby(), {}) for model in MODELS},
    **{f"{model}-pfeiffer": (pfeiffer(), {}) for model in MODELS},
    **{f"{model}-parallel": (parallel(), {}) for model in MODELS},
    **{f"{model}-pfeiffer_inv": (pfeiffer(**NICE), {}) for model in MODELS},
    "bert-houlsby_inv": (houlsby(**NICE), {}),
    "bert-houlsby_inv_lm": (houlsby(**NICE), {"class": "BertForMaskedLM"}),
    "gpt2-pfeiffer_inv_lm": (pfeiffer(**NICE), {"class": "GPT2LMHeadModel"}),
    "xlmr-parallel_inv": (parallel(**NICE), {}),
    "bert-houlsby_learned": (houlsby(scaling="learned"), {}),
    "bert-pfeiffer_channel": (pfeiffer(scaling="channel"), {}),
    "roberta-parallel_learned": (parallel(scaling="learned"), {}),
    "gpt2-houlsby_scaled": (houlsby(scaling=0.5, non_linearity="gelu"), {}),
    "gpt2-adapter_plus": (adapters.AdapterPlusConfig(reduction_factor=8, stochastic_depth=0.0), {}),
    "bert-houlsby_factors": (houlsby(reduction_factor={"0": 2, "default": 5.3}), {}),
    "bart-pfeiffer_factors": (pfeiffer(reduction_factor={"1": 4, "3": 16, "default": 8}), {}),
    "bert-pfeiffer_leave_out": (pfeiffer(leave_out=[1]), {}),
    "bart-houlsby_leave_out": (houlsby(leave_out=[0, 3]), {}),
    "t5-houlsby_leave_out": (houlsby(leave_out=[1, 2], cross_adapter=True), {}),
    "bart-houlsby_cross": (houlsby(cross_adapter=True), {}),
    "t5-houlsby_cross": (houlsby(cross_adapter=True), {}),
    "bart-pfeiffer_cross": (pfeiffer(cross_adapter=True), {}),
    "bert-attention_only": (houlsby(output_adapter=False), {}),
    "distilbert-pfeiffer_both": (pfeiffer(mh_adapter=True), {}),
    # Heads.
    "bert-two_layers": with_head(pfeiffer(), "classification", num_labels=3, id2label=LABELS),
    "bert-pooler": with_head(pfeiffer(), "classification", num_labels=3, layers=1, use_pooler=True),
    "bert-pooler_two_layers": with_head(
        pfeiffer(), "classification", num_labels=2, use_pooler=True
    ),
    "bert-one_layer": with_head(pfeiffer(), "classification", num_labels=3, layers=1),
    "bert-regression": with_head(pfeiffer(), "classification", num_labels=1),
    "bert-multilabel": with_head(houlsby(), "classification", num_labels=3, multilabel=True),
    "bert-tagging": with_head(houlsby(), "tagging", num_labels=3, id2label=LABELS),
    "bert-questions": with_head(houlsby(), "qa"),
    "bert-choice": with_head(houlsby(), "multiple_choice", num_choices=2),
    "bert-static": (houlsby(), {"static": "BertForSequenceClassification"}),
    "bert-static_tagging": (houlsby(), {"static": "BertForTokenClassification"}),
    "roberta-two_layers": with_head(pfeiffer(), "classification", num_labels=3, id2label=LABELS),
    "roberta-static": (houlsby(), {"static": "RobertaForSequenceClassification"}),
    "xlmr-tagging": with_head(pfeiffer(), "tagging", num_labels=3),
    "distilbert-two_layers": with_head(pfeiffer(), "classification", num_labels=3),
    "distilbert-static": (houlsby(), {"static": "DistilBertForSequenceClassification"}),
    "distilbert-questions": with_head(houlsby(), "qa"),
    "bart-two_layers": with_head(pfeiffer(), "classification", num_labels=3),
    "gpt2-two_layers": with_head(pfeiffer(), "classification", num_labels=3),
    "gpt2-static": (houlsby(), {"static": "GPT2ForSequenceClassification"}),
    "gpt2-tagging": with_head(pfeiffer(), "tagging", num_labels=3),
    "t5-two_layers": with_head(pfeiffer(), "classification", num_labels=3),
    # As earlier versions wrote them.
    "bert-old_task": (pfeiffer(non_linearity="gelu_new", **NICE), {"old": "text_task"}),
    "bert-old_language": (pfeiffer(**NICE), {"old": "text_lang"}),
    "roberta-old_houlsby": (houlsby(non_linearity="gelu"), {"old": "text_task"}),
    "bert-pickled": with_head(
        houlsby(non_linearity="gelu"), "classification", num_labels=3, id2label=LABELS
    ),
}


def make(name: str, folder: Path) -> None:
    """Write one folder as the library saves it."""
    config, facts = CASES[name]
    torch.manual_seed(0)
    model = _new_model(name)
    model.add_adapter("task", config=config)
    if "head" in facts:
        method, options = facts["head"]
        getattr(model, method)("task", **options)
    _fill_added(model, facts)
    pickled = name == "bert-pickled" or "old" in facts
    has_head = "head" in facts or "static" in facts
    model.save_adapter(str(folder), "task", with_head=has_head, use_safetensors=not pickled)
    if "old" in facts:
        _age(folder, facts["old"])


def evaluate(name: str, folder: Path) -> list[Any]:
    """Load a folder with the library into a fresh model, and return the outputs in float64."""
    facts = CASES[name][1]
    file = folder / "head_config.json"
    is_flexible = file.exists() and json.loads(file.read_text())["config"] is not None
    model = _new_model(name, is_flexible)
    pickled = name == "bert-pickled" or "old" in facts
    use_safetensors = not pickled or any(folder.glob("*.safetensors"))
    has_head = "head" in facts or "static" in facts
    loaded = model.load_adapter(str(folder), with_head=has_head, use_safetensors=use_safetensors)
    model.set_active_adapters(loaded)
    if "class" in facts:
        _add_language_model_head(model, tiny_base(name.partition("-")[0], facts["class"]))
    model = model.double().eval()
    batch = inputs(name.partition("-")[0])
    if name == "bert-choice":
        batch = {key: value.unsqueeze(0) for key, value in batch.items()}
    if "static" in facts or "head" in facts:
        batch.pop("decoder_input_ids", None)
    # Without a head, the encoder alone: the library's own class for T5 scales its output.
    is_alone = not has_head and "class" not in facts
    with torch.no_grad(), whole_float64():
        outputs = (model.base_model if is_alone else model)(**batch)
    if "start_logits" in outputs:
        return torch.stack([outputs.start_logits, outputs.end_logits]).tolist()
    result = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    return result[..., :6].tolist()  # the last norm and the head mix what is left out into these


def _new_model(name: str, is_flexible: bool = False) -> Any:
    base, facts = name.partition("-")[0], CASES[name][1]
    if "static" in facts and not is_flexible:
        model = tiny_base(base, facts["static"], num_labels=3, id2label=LABELS, label2id=ABC)
        adapters.init(model)
    else:
        model = fill(AutoAdapterModel.from_config(tiny_config(base))).eval()
    model.name_or_path = f"tiny/{base}"
    for config in (model.base_model.config, model.config):
        config._name_or_path = model.name_or_path
    return model


def _add_language_model_head(model: Any, base: Any) -> None:
    """Add the base model's own head as a flexible one: the library inverts the coupling before
    these alone.
    """
    if hasattr(base, "cls"):
        model.add_masked_lm_head("own", activation_function="gelu")
        head = base.cls.predictions
        parts = {"0": head.transform.dense, "2": head.transform.LayerNorm, "3": head.decoder}
    else:
        model.add_causal_lm_head("own", layers=1)
        parts = {"0": base.lm_head}
    for number, part in parts.items():
        getattr(model.heads["own"], number).load_state_dict(part.state_dict(), strict=False)


def _fill_added(model: Any, facts: dict[str, Any]) -> None:
    """Give the adapter, and its head, weights that are far from the initial ones."""
    prefix, added = f"{model.base_model_prefix}.", []
    for name, weight in model.named_parameters():
        if ".task." in name or ("static" in facts and not name.startswith(prefix)):
            added.append((name, weight))
    for number, (name, weight) in enumerate(added):
        with torch.no_grad():
            offset = 1.0 if name.endswith("scaling") else 0.0
            generator = torch.Generator().manual_seed(number)
            # T5's attention, whose scores are not divided by the root of their width, magnifies
            # rounding errors.
            scale = 0.1 if "adapters." in name or model.config.model_type == "t5" else 0.5
            weight.copy_(offset + scale * torch.randn(weight.shape, generator=generator))


def _age(folder: Path, kind: str) -> None:
    """Rewrite a folder as adapter-transformers 1 wrote it: no version, other names, the invertible
    adapter nested.
    """
    file = folder / "adapter_config.json"
    fields = json.loads(file.read_text())
    del fields["version"]
    fields["type"] = kind
    config = fields["config"]
    names = {"gelu_new": "gelu", "gelu": "gelu_orig"}
    config["non_linearity"] = names.get(config["non_linearity"], config["non_linearity"])
    if config.pop("inv_adapter"):
        block = {"block_type": "nice", "non_linearity": "relu", "reduction_factor": 2}
        config["invertible_adapter"] = block
    del config["inv_adapter_reduction_factor"]
    left_out = ("phm", "shared", "stoch")
    fields["config"] = {key: value for key, value in config.items() if not key.startswith(left_out)}
    file.write_text(json.dumps(fields, indent=2, sort_keys=True))
    weights = torch.load(folder / "pytorch_adapter.bin", weights_only=True)
    task_or_lang = kind.replace("text_", "")
    renamed = {}
    for key, value in weights.items():
        if "invertible_adapters." in key:
            if kind == "text_task":
                continue
            key = key.replace("invertible_adapters.", "invertible_lang_adapters.")
        owner = f"text_{task_or_lang}_adapters."
        key = key.replace("attention.output.adapters.", f"attention.output.attention_{owner}")
        renamed[key.replace("output.adapters.", f"output.layer_{owner}")] = value
    torch.save(renamed, folder / "pytorch_adapter.bin")


def write() -> None:
    """Write every golden folder with its expected outputs."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in CASES:
        folder = GOLDEN / name
        folder.mkdir(parents=True)
        make(name, folder)
        (folder / EXPECTED).write_text(json.dumps(evaluate(name, folder)))
        print(name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    write()
