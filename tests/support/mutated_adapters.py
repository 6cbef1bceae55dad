"""Adapter folders that are damaged in ways that people, disks and bad intentions damage them, each
by its number.

`mutate(number, files)` always changes the same files in the same way, so that a case can be run
again by its number.
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
PREFIX = "base_model.model."
Files = dict[str, bytes]

# Markdown, HTML, YAML and Jinja that would change a page if it were not escaped, and texts that are
# no names at all.
HOSTILE = (
    "two\n\n# lines", "# heading", "- item", "> quote", "a | b", "`code`", "``", "*strong*",
    "__strong__", "~~struck~~", "[link](https://evil.example)",
    "![image](https://evil.example/x.png)", "<script>alert(1)</script>", "<!-- comment",
    "<details>", "&lt;b&gt;", "```\n## Section", "~~~\n## Section", "$$x$$", "back\\slash\\",
    "a\u2028## Section", "---", "a: b\n---\nc", "{{ 7 * 7 }}", "{% if x %}",
    "https://evil.example/login", "www.evil.example", "me@evil.example",
    "==mark== :smile: @user #1", "'\"; rm -rf ~ #", "\x1b[31mred\x07", "\u202egnirts",
)  # fmt: skip
# What stands where another type belongs.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 64, 10**9, 10**40, 0.5, -2.5, math.nan, math.inf, "", "64",
    "gelu", "relu", "all", "../../etc", "(", "((a|b)+)+x", "a.b", [], [1], ["a"], [None], [[]], {},
    {"0": "a"}, {"a": 1}, {"a": {"b": [0]}}, "x" * 3000, "nan",
)  # fmt: skip
NUMBERS = (0, 1, 3e38, 1e300, math.nan, -math.inf)
DTYPES = (
    torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def mutate(number: int, files: Files) -> tuple[Files, str]:
    """Return changed files, and in words what was changed in them."""
    chance = random.Random(number)
    said = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        change = chance.choice(CHANGES)
        try:
            files, change_in_words = change(chance, dict(files))
        except Exception:  # an earlier change has left nothing to change
            continue
        said.append(change_in_words)
    return files, "; ".join(said) or "nothing"


def _change_bytes(chance: random.Random, files: Files) -> tuple[Files, str]:
    name = chance.choice(sorted(files))
    content = files[name]
    place = chance.randrange(len(content))
    if name == WEIGHTS and chance.random() < 0.5:
        # In the header, which is the smaller part of large files.
        place %= 8 + int.from_bytes(content[:8], "little")
    flipped = bytearray(content)
    flipped[place] ^= 1 << chance.randrange(8)
    changed = chance.choice((
        bytes(flipped), bytes(flipped), content[:place], content[:-1], b"", b"\0" * len(content),
        content * 2, b"\xef\xbb\xbf" + content, b"null", b"[]", b"{}", b"\xff\xfe",
        chance.randbytes(200),
        b"<!DOCTYPE html><html>Sign in to the network</html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    ))  # fmt: skip
    words = f"{name}: changed at {place} to {changed[:20]!r} ..., {len(changed)} bytes"
    return files | {name: changed}, words


def _move_files(chance: random.Random, files: Files) -> tuple[Files, str]:
    first, second = chance.choice(sorted(files)), chance.choice(sorted(files))
    names = (f"{first}.bak", first.upper(), "adapter_model.bin", "config.json", "aé\U0001f600.png")
    unused = chance.choice(names)
    match chance.randrange(3):
        case 0:
            content = files.pop(first)
            return files | {unused: content}, f"{first} renamed to {unused}"
        case 1:
            exchanged = {first: files[second], second: files[first]}
            return files | exchanged, f"{first} and {second} exchanged"
    return files | {unused: chance.choice((b"{}", b"[]", b"", b"import os"))}, f"{unused} added"


def _change_json(chance: random.Random, files: Files) -> tuple[Files, str]:
    """Replace, remove, rename or add a value anywhere in a JSON file."""
    name = chance.choice((CONFIG, CONFIG, CONFIG, TOKENIZER, TOKENIZER_CONFIG))
    whole = json.loads(files[name])
    inner, path = whole, [name]
    # Down from the top, so that the two hundred words of a vocabulary are not what is changed most.
    while True:
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        path.append(str(key))
        if not (isinstance(inner[key], (dict, list)) and inner[key] and chance.random() < 0.6):
            break
        inner = inner[key]
    value = copy.deepcopy(chance.choice(VALUES))
    match chance.randrange(6):
        case 0:
            del inner[key]
            change = "removed"
        case 1 if isinstance(inner, dict):
            inner[f"{key}_"] = inner.pop(key)
            change = "renamed"
        case 2 if isinstance(inner, dict):
            inner["unknown"] = value
            change = f"another key beside it with {value!r:.40}"
        case _:
            inner[key] = value
            change = f"now {value!r:.40}"
    return files | {name: json.dumps(whole).encode()}, f"{'.'.join(path)} {change}"


def _change_record(chance: random.Random, files: Files) -> tuple[Files, str]:
    """Give a part of the record, or an option, a value of another type."""
    whole = json.loads(files[CONFIG])
    base = whole["recorded"]["base"]
    weight = chance.choice(sorted(base["tensors"]))
    parents: dict[str, tuple[Any, str]] = {
        "recorded": (whole, "recorded"),
        "the base model": (whole["recorded"], "base"),
        "the base model's configuration": (base, "config"),
        "the width of the base model": (base["config"], "hidden_size"),
        "the samples of the base model": (base, "samples"),
        "the weights of the base model": (base, "tensors"),
        "a weight of the base model": (base["tensors"], weight),
        "the heads": (whole["recorded"], "heads"),
        "the places": (whole["recorded"], "places"),
        "trained tokens": (whole, "trainable_token_indices"),
        "modules to save": (whole, "modules_to_save"),
        "the task": (whole, "task_type"),
        "the class": (whole, "auto_mapping"),
    }
    part = chance.choice(sorted(parents))
    parent, key = parents[part]
    parent[key] = copy.deepcopy(chance.choice(VALUES))
    changed = json.dumps(whole).encode()
    return files | {CONFIG: changed}, f"{part} now {parent[key]!r:.40}"


def _change_tensor(chance: random.Random, files: Files) -> tuple[Files, str]:
    tensors = load(files[WEIGHTS])
    name = chance.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kinds: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "removed": dict,
        "renamed": lambda: {f"{name}s": tensor},
        "copied": lambda: {name: tensor, f"{name}.more": tensor.clone()},
        "beside a resized embedding": lambda: {name: tensor, f"{PREFIX}x.weight": torch.ones(2)},
        "longer": lambda: {name: torch.cat([tensor, tensor])},
        "flat": lambda: {name: tensor.reshape(-1).clone()},
        "empty": lambda: {name: torch.zeros(0)},
        "one number": lambda: {name: torch.tensor(1.0)},
        "of another type": lambda: {name: tensor.to(chance.choice(DTYPES))},
        "full of one value": lambda: {name: tensor.double().fill_(chance.choice(NUMBERS))},
        "in another name space": lambda: {f"../../{name}": tensor},
    }
    change = chance.choice(sorted(kinds))
    changed = save(tensors | kinds[change](), metadata={"format": "pt"})
    return files | {WEIGHTS: changed}, f"{name} {change}"


CHANGES = (_change_bytes, _move_files, _change_json, _change_json, _change_record, _change_tensor)
