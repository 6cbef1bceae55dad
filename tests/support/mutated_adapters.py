"""Adapter folders that are damaged in ways that people, disks and bad intentions damage them, each by its number.

`mutate(number, files)` always changes the same files in the same way, so that a case can be run again by its number.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
Files = dict[str, bytes]

# Markdown, HTML, YAML and Jinja that would change a page if it were not escaped, and texts that are no names at all.
HOSTILE = (
    "two\n\n# lines", "# heading", "- item", "> quote", "a | b", "`code`", "``", "*strong*", "__strong__",
    "~~struck~~", "[link](https://evil.example)", "![image](https://evil.example/x.png)", "<script>alert(1)</script>",
    "<!-- comment", "<details>", "&lt;b&gt;", "```\n## Section", "~~~\n## Section", "$$x$$", "back\\slash\\",
    "a\u2028## Section", "---", "a: b\n---\nc", "{{ 7 * 7 }}", "{% if x %}", "https://evil.example/login",
    "www.evil.example", "me@evil.example", "==mark== :smile: @user #1", "'\"; rm -rf ~ #", "\x1b[31mred\x07",
    "\u202egnirts",
)  # fmt: skip
# What stands where another type belongs.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 64, 10**9, 10**40, 0.5, -2.5, math.nan, math.inf, "", "64", "gelu", "relu", "all",
    "../../etc", "(", "((a|b)+)+x", "a.b", [], [1], ["a"], [None], [[]], {}, {"0": "a"}, {"a": 1}, {"a": {"b": [0]}},
    "x" * 3000, "nan",
)  # fmt: skip
DTYPES = (
    torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
)  # fmt: skip


def mutate(number: int, files: Files) -> tuple[Files, str]:
    """Return changed files, and in words what was changed in them."""
    chance = random.Random(number)
    said = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        change = chance.choice(_CHANGES)
        try:
            files, what = change(chance, dict(files))
        except Exception:  # an earlier change has left nothing to change
            continue
        said.append(what)
    return files, "; ".join(said) or "nothing"


def _any_file(chance: random.Random, files: Files) -> str:
    return chance.choice(sorted(files))


def _flip_bytes(chance: random.Random, files: Files) -> tuple[Files, str]:
    name = _any_file(chance, files)
    content = bytearray(files[name])
    places = [chance.randrange(len(content)) for _ in range(chance.choice((1, 1, 3, 20)))]
    if name == WEIGHTS and chance.random() < 0.5:  # in the header, which is the smaller part of large files
        places = [place % (8 + int.from_bytes(content[:8], "little")) for place in places]
    for place in places:
        content[place] ^= 1 << chance.randrange(8)
    return files | {name: bytes(content)}, f"{name}: bits flipped at {places[:3]}"


def _cut(chance: random.Random, files: Files) -> tuple[Files, str]:
    name = _any_file(chance, files)
    length = chance.choice((0, 1, 8, len(files[name]) // 2, len(files[name]) - 1, chance.randrange(len(files[name]))))
    return files | {name: files[name][:length]}, f"{name}: cut to {length} bytes"


def _replace_bytes(chance: random.Random, files: Files) -> tuple[Files, str]:
    name = _any_file(chance, files)
    content = chance.choice((
        b"\0" * len(files[name]), files[name] * 2, files[name] + b"\n", b"\xef\xbb\xbf" + files[name], b"null", b"[]",
        b"{}", b'"text"', b"<!DOCTYPE html><html>Sign in to the network</html>", b"\xff\xfe",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", chance.randbytes(200),
    ))  # fmt: skip
    return files | {name: content}, f"{name}: now {content[:20]!r} ..."


def _move_files(chance: random.Random, files: Files) -> tuple[Files, str]:
    name = _any_file(chance, files)
    match chance.randrange(4):
        case 0:
            content = files.pop(name)
            new = chance.choice((f"{name}.bak", name.upper(), "adapter_model.bin", "config.json"))
            return files | {new: content}, f"{name} renamed to {new}"
        case 1:
            del files[name]
            return files, f"{name} removed"
        case 2:
            other = _any_file(chance, files)
            return files | {name: files[other], other: files[name]}, f"{name} and {other} exchanged"
    new = chance.choice(
        ("special_tokens_map.json", "added_tokens.json", "config.json", "x.py", "a\u00e9\U0001f600.png")
    )
    return files | {new: chance.choice((b"{}", b"[]", b"", b'{"[NEW]": 7}', b"import os"))}, f"{new} added"


def _change_json(chance: random.Random, files: Files) -> tuple[Files, str]:
    """Replace, remove, rename or add a value anywhere in a JSON file."""
    name = chance.choice((CONFIG, CONFIG, CONFIG, TOKENIZER, TOKENIZER_CONFIG))
    whole = json.loads(files[name])
    inner, path = whole, [name]
    # Down from the top, so that the two hundred words of a vocabulary are not what is changed most.
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = chance.choice(keys)
        path.append(str(key))
        if not (isinstance(inner[key], (dict, list)) and inner[key] and chance.random() < 0.6):
            break
        inner = inner[key]
    value = copy.deepcopy(chance.choice(VALUES))
    match chance.randrange(6):
        case 0:
            del inner[key]
            what = "removed"
        case 1 if isinstance(inner, dict):
            inner[f"{key}_"] = inner.pop(key)
            what = "renamed"
        case 2 if isinstance(inner, dict):
            inner["unknown"] = value
            what = f"another key beside it with {value!r:.40}"
        case 3 if isinstance(inner[key], (int, float)):
            inner[key] = chance.choice(
                (-inner[key], inner[key] + 1, inner[key] * 1000, not inner[key], str(inner[key]))
            )
            what = f"now {inner[key]!r}"
        case _:
            inner[key] = value
            what = f"now {value!r:.40}"
    return files | {name: json.dumps(whole).encode()}, f"{'.'.join(path)} {what}"


def _set_field(chance: random.Random, files: Files) -> tuple[Files, str]:
    """Give a field of the configuration, of its record or of the tokenizer a value of any type."""
    config = json.loads(files[CONFIG])
    where, inside = chance.choice(((CONFIG, None), (CONFIG, None), (CONFIG, "recorded"), (TOKENIZER_CONFIG, None)))
    whole = config if where == CONFIG else json.loads(files[where])
    inner = whole.setdefault(inside, {}) if inside else whole
    of_record = ("max_length", "null_threshold", "text_columns")
    more = {None: ("revision", "auto_mapping", "base_fingerprint"), "recorded": of_record}[inside]
    more = ("model_max_length", "padding_side", "tokenizer_class", "pad_token") if where == TOKENIZER_CONFIG else more
    key, value = chance.choice([*inner, *more]), copy.deepcopy(chance.choice(VALUES))
    inner[key] = value
    return files | {where: json.dumps(whole).encode()}, f"{where}.{inside or ''}.{key} now {value!r:.40}"


def _change_labels(chance: random.Random, files: Files) -> tuple[Files, str]:
    config = json.loads(files[CONFIG])
    count = len(config["id2label"] or config["recorded"]["id2label"])
    texts = [*HOSTILE, "", " ", "same", "same", "x" * 10_000, "\ud800", "0", "None"]
    labels = {str(number): chance.choice(texts) for number in range(count)}
    if chance.random() < 0.2:
        labels = {f" {number}": name for number, name in labels.items()}
    for fields in (config, config["recorded"]):
        if "id2label" in fields:
            fields["id2label"] = labels
    return files | {CONFIG: json.dumps(config).encode()}, f"labels now {list(labels.values())!r:.60}"


def _change_tensor(chance: random.Random, files: Files) -> tuple[Files, str]:
    tensors = load(files[WEIGHTS])
    name = chance.choice(sorted(tensors))
    tensor, rows = tensors[name], len(tensors[name])

    def poked(value: float) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[chance.randrange(tensor.numel())] = value
        return changed

    kinds: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "removed": dict,
        "renamed": lambda: {f"{name}s": tensor},
        "copied": lambda: {name: tensor, f"{name}.more": tensor},
        "beside a stranger": lambda: {name: tensor, "stranger": torch.ones(2)},
        "beside a resized embedding": lambda: {name: tensor, "base_model.model.x.weight": torch.ones(2)},
        "longer": lambda: {name: torch.cat([tensor, tensor])},
        "shorter": lambda: {name: tensor[: rows - 1].clone()},
        "flat": lambda: {name: tensor.reshape(-1).clone()},
        "transposed": lambda: {name: tensor.t().contiguous()},
        "empty": lambda: {name: torch.zeros(0)},
        "one number": lambda: {name: torch.tensor(1.0)},
        "with NaN": lambda: {name: poked(math.nan)},
        "with infinity": lambda: {name: poked(-math.inf)},
        "with 1e300": lambda: {name: tensor.double().fill_(1e300)},
        "with 3e38": lambda: {name: tensor.clone().fill_(3e38)},
        "with zeros": lambda: {name: torch.zeros_like(tensor)},
        "with other values": lambda: {name: poked(chance.uniform(-1, 1))},
        "in another name space": lambda: {f"../../{name}": tensor},
    }
    if chance.random() < 0.3:
        dtype = chance.choice(DTYPES)
        tensors[name] = tensor.to(dtype)
        return files | {WEIGHTS: save(tensors)}, f"{name} is {dtype}"
    what = chance.choice(sorted(kinds))
    del tensors[name]
    return files | {WEIGHTS: save(tensors | kinds[what](), metadata={"format": "pt"})}, f"{name} {what}"


def _break_tokenizer(chance: random.Random, files: Files) -> tuple[Files, str]:
    whole = json.loads(files[TOKENIZER])
    vocabulary = whole["model"]["vocab"]
    words = sorted(vocabulary)
    match what := chance.choice(
        ("ids beyond the embedding", "words lost", "ids twice", "ids huge", "long", "another")
    ):
        case "ids beyond the embedding":
            vocabulary |= {word: number + 150 for word, number in vocabulary.items()}
        case "words lost":
            whole["model"]["vocab"] = {word: vocabulary[word] for word in words[: chance.randrange(20)]}
        case "ids twice":
            vocabulary |= dict.fromkeys(words, 3)
        case "ids huge":
            vocabulary[chance.choice(words)] = chance.choice((2**31, 2**32 - 1, 2**63, -1))
        case "long":
            whole["post_processor"]["single"] *= 40
        case "another":
            kind = chance.choice(("BPE", "Unigram", "WordLevel", "None", 5))
            whole[chance.choice(("model", "normalizer", "pre_tokenizer", "post_processor", "decoder"))] = {
                "type": kind
            }
    return files | {TOKENIZER: json.dumps(whole).encode()}, f"{TOKENIZER}: {what}"


_CHANGES = (
    _flip_bytes, _flip_bytes, _cut, _replace_bytes, _move_files, _change_json, _change_json, _change_json, _set_field,
    _set_field, _set_field, _change_labels, _change_tensor, _change_tensor, _change_tensor, _break_tokenizer,
)  # fmt: skip
