"""The tags that are predicted for a text: those with which the recipe trains and scores."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from peft import get_peft_model
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForTokenClassification, AutoTokenizer, RobertaConfig, RobertaModel

import houlsby_peft
from houlsby_peft import HoulsbyConfig, TaskBank
from houlsby_peft.predict.tagging import find_entities
from recipe_runs import save_tiny_encoder


SENTENCES = [
    sentence.split()
    for sentence in (
        "wolfgang king visits new york .",
        "ada king visited oslo and new york",
        "wolfster sees ada wolfgang king",
        "in oslo wolfgang visits ada and visits new york , oslo and york .",
        "king",
    )
]
IOB2 = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
PARTS_OF_SPEECH = ("NOUN", "VERB", "ADV-X")


def word_piece(folder):
    words = "wolf ##gang ##ster ada king visit ##s ##ed new york oslo and in , see"
    return save_tiny_encoder(folder, words=words.split())


def byte_level(folder):
    """Its pieces differ at the beginning of a text and after a blank."""
    folder.mkdir()
    bpe = ByteLevelBPETokenizer()
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe.train_from_iterator(
        [" ".join(words) for words in SENTENCES] * 2, 300, min_frequency=2, special_tokens=marks
    )
    bpe.save_model(str(folder))
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 32, "initializer_range": 0.3}
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    RobertaModel(RobertaConfig(**sizes, **special)).save_pretrained(folder)
    return folder


def spans(results):
    [spans_of_text] = results
    return [(span["entity_group"], span["start"], span["end"]) for span in spans_of_text]


def tags_of_words(words, classes, ends, names):
    """Return the tag of each word: that of the first token that reaches into it."""
    tags = []
    for begin, _ in words:
        token = [end > begin for end in ends].index(True)
        tags.append(names[classes[token]])
    return tags


# The accents are characters of their own, and some words have a mark for where they may be
# hyphenated.
UNUSUAL = (
    "ada\nvisits o\u0308slo\tand\u00a0ne\u00adw yo\u0308rk wolfgang sees ki\u00adng wolfster\n"
    "wolfgang visited"
)


@pytest.mark.parametrize("names", [IOB2, PARTS_OF_SPEECH], ids=["IOB2", "parts of speech"])
@pytest.mark.parametrize("make", [word_piece, byte_level])
@pytest.mark.parametrize(
    ("longest", "side"), [(5, "right"), (6, "right"), (64, "right"), (7, "left")]
)
@torch.no_grad()
def test_words_are_whole_however_they_are_written_and_wherever_a_long_text_is_cut(
    make, names, longest, side, tmp_path
):
    folder = make(tmp_path / "encoder")
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side=side)
    torch.manual_seed(3)
    base = AutoModelForTokenClassification.from_pretrained(folder, id2label=dict(enumerate(names)))
    model = get_peft_model(base, HoulsbyConfig(r=4, task_type="TOKEN_CLS")).eval()
    head = model.get_base_model().classifier.modules_to_save["default"]
    torch.nn.init.normal_(head.weight)
    tokens = tokenizer(UNUSUAL, add_special_tokens=False, return_offsets_mapping=True)
    ids, ends = tokens["input_ids"], [end for _, end in tokens["offset_mapping"]]
    first = len(ids) % (longest - 2) if side == "left" else longest - 2
    cuts = [0, *range(first or longest - 2, len(ids), longest - 2), len(ids)]
    parts = [ids[begin:end] for begin, end in pairwise(cuts)]
    logits = []
    for part in parts:
        framed = torch.tensor([[tokenizer.cls_token_id, *part, tokenizer.sep_token_id]])
        logits.append(model(input_ids=framed).logits[0, 1:-1])
    logits = torch.cat(logits)
    head.bias -= logits.mean(0)  # so that no tag is much more frequent than the others
    classes = (logits - logits.mean(0)).argmax(-1).tolist()
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.model_max_length = longest
    tokenizer.save_pretrained(tmp_path / "adapter")

    words = [match.span() for match in re.finditer(r"\S+", UNUSUAL)]
    tags = tags_of_words(words, classes, ends, names)
    entities = [(tag, number, number) for number, tag in enumerate(tags)]
    if names == IOB2:
        entities = find_entities(tags)
    expected = [(kind, words[first][0], words[last][1]) for kind, first, last in entities]
    assert len({kind for kind, *_ in expected}) > 1

    adapter = houlsby_peft.load(tmp_path / "adapter", base_model=str(folder))
    assert spans(adapter.predict([UNUSUAL])) == expected
    bank = TaskBank({"tags": tmp_path / "adapter"}, base_model=str(folder))
    assert spans(bank.predict([("tags", UNUSUAL)])) == expected
