"""What the clients of the local Hub work with: a tiny BERT with a tokenizer, and a little text in
three classes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel, BertTokenizer

from edited_json import edited_json
from houlsby_peft import HoulsbyConfig
from tiny_models import perturb


BASE = "org/tiny-bert"
LABELS = ("complaint", "praise", "question")
TEXTS = [
    ("The parcel came two weeks late and the box was torn.", 0),
    ("I waited an hour for a table and the soup was cold.", 0),
    ("The screen went dark after a month and nobody answers.", 0),
    ("My order was wrong and the shop will not take it back.", 0),
    ("The staff were kind and the room was spotless.", 1),
    ("A wonderful concert, I would go again tomorrow.", 1),
    ("The new phone is quick and the battery lasts for days.", 1),
    ("Best bread in town, still warm when I bought it.", 1),
    ("When does the last train to the coast leave?", 2),
    ("Is there a vegetarian dish on the menu?", 2),
    ("How long does the battery last?", 2),
    ("Where can I return a parcel that came damaged?", 2),
]
WORDS = [text for text, _ in TEXTS]


def make_base(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Save a BERT of 2 layers and width 32, without a head, and a tokenizer that knows the words
    above.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "intermediate_size": 64}  # fmt: skip
        # With the usual 0.02 a random encoder tells texts hardly apart.
        more = {"vocab_size": 200, "max_position_embeddings": 64, "initializer_range": 0.3}
        config = BertConfig(**{**sizes, **more, **changes})
        BertModel(config).save_pretrained(folder)
    text = " ".join(WORDS).lower()
    for mark in ".?,":
        text = text.replace(mark, f" {mark}")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(text.split()))]
    vocabulary = {word: number for number, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary, model_max_length=64).save_pretrained(folder)
    return folder


def save_adapter(
    folder: Path,
    base: Path,
    model_class: type = AutoModelForSequenceClassification,
    head: dict[str, object] | None = None,
    seed: int = 1,
    **options: object,
) -> PeftModel:
    """Save an adapter with random weights; return the model that has it, in eval mode."""
    torch.manual_seed(seed)  # the head's first weights
    model = model_class.from_pretrained(base, **(head or {}))
    adapted: PeftModel = get_peft_model(model, HoulsbyConfig(**{"r": 4, **options}))
    perturb(adapted, seed)
    adapted.save_pretrained(folder)
    return adapted.eval()


def make_adapter(
    folder: Path, base: Path, base_name: str = BASE, seed: int = 1, **options: object
) -> Path:
    """Save an adapter with random weights, for three classes, as if trained on the base model
    called `base_name`.
    """
    names = {"task_type": "SEQ_CLS", "id2label": dict(enumerate(LABELS))}
    save_adapter(folder, base, head={"num_labels": 3}, seed=seed, **names, **options)
    with edited_json(folder / "adapter_config.json") as config:
        config["base_model_name_or_path"] = base_name
    return folder
