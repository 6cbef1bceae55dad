"""The printed map, its command, and the printed list of architectures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from peft import get_peft_model

from architecture_cases import CASES
from houlsby_peft import HoulsbyConfig
from houlsby_peft.placement.show import main, placement_map
from houlsby_peft.placement.table import ARCHITECTURES


BERT_BASE = """\
BertForSequenceClassification

bert.encoder.layer.0-11  norm          attention.output.LayerNorm  768
bert.encoder.layer.0-11  attention     attention.output.dropout    768
bert.encoder.layer.0-11  norm          output.LayerNorm            768
bert.encoder.layer.0-11  feed_forward  output.dropout              768

4 bottlenecks at 24 places (r=64)                  396,544
24 norms                                            36,864
module to save: classifier                           1,538
trainable (0.40% of the base model's 109,483,778)  434,946
"""
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


@pytest.fixture
def bert_base(tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_command_prints_the_map_of_bert_base(bert_base):
    program = ["-W", "error::RuntimeWarning", "-m", "houlsby_peft.placement"]
    command = [sys.executable, *program, bert_base]
    options = ["--model_class", "AutoModelForSequenceClassification", "--share_layers", "3"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert result.stdout == BERT_BASE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train_layer_norm": "all", "share_layers": 2},
        {"layers_to_transform": [0], "train_layer_norm": False, "activation": "prelu"},
        {"modules_to_save": ["bert.embeddings"], "rank_pattern": {"output.dropout": 2}},
    ],
)
def test_the_map_counts_what_trains(options):
    base = transformers.BertForTokenClassification(transformers.BertConfig(**CASES["bert"].config))
    parameters = sum(weight.numel() for weight in base.parameters())
    config = HoulsbyConfig(r=4, **options)
    printed = placement_map(base, config).splitlines()[-1]
    trainable, _ = get_peft_model(base, config).get_nb_trainable_parameters()
    assert printed.split()[-1] == f"{trainable:,}"
    assert f"{trainable / parameters:.2%} of the base model's {parameters:,}" in printed


def test_places_outside_of_layers_are_named_in_full(capsys):
    base = CASES["bert"].model()
    printed = placement_map(base, HoulsbyConfig(train_layer_norm="all")).splitlines()
    assert printed[2].split() == ["norm", "embeddings.LayerNorm", "16"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["{model}", "--r", "0"], "HoulsbyConfig.r"),
        (["{model}", "--model_class", "NoSuchModel"], "NoSuchModel"),
        (["{model}/missing"], "missing"),
        (["{model}", "--positions", "cross_attention"], "cross_attention"),
    ],
)
def test_the_command_refuses_in_words(arguments, word, bert_base, capsys):
    with pytest.raises(SystemExit):
        main([argument.format(model=bert_base) for argument in arguments])
    assert word in capsys.readouterr().err


def test_the_page_has_every_architecture():
    _, _, listed = PAGE.read_text().partition("<!-- architectures:begin -->")
    names = re.findall(r"`(.+?)`", listed.partition("<!-- architectures:end -->")[0])
    assert sorted(names) == sorted(ARCHITECTURES)
