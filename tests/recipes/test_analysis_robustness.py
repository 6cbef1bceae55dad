"""Word substitution: synonyms from WordNet's files, the attack against cases worked by hand, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from recipe_runs import run, save_tiny_encoder


pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed")
import glue
import robustness
from analysis.pwws import FUNCTION_WORDS, pwws
from analysis.runs import load_run
from analysis.wordnet import WordNet, find_wordnet
from training.errors import RecipeError


DEBIAN = Path("/usr/share/wordnet")
SYNSETS = {
    "noun": [["film", "movie"], ["film", "thin_film", "coat"], ["light", "lamp"], ["well"]],
    "verb": [["light", "ignite"]],
    "adj": [["good(p)", "fine"], ["good", "Good", "honest"], ["light", "pale"], ["light", "airy"]],
    "adv": [["well", "good"]],
}
TAGGED = ["film%1:10:00:: 1 9", "good%3:00:01:: 1 20", "good%4:02:00:: 1 3", "well%4:02:00:: 1 8"]


def write_wordnet(folder: Path) -> Path:
    """A database of a few synsets in WordNet's format."""
    for part, synsets in SYNSETS.items():
        data, offsets = b"  1 A licence.\n", {}
        for words in synsets:
            for word in words:
                offsets.setdefault(word.partition("(")[0].lower(), []).append(len(data))
            listed = " ".join(f"{word} 0" for word in words)
            data += f"{len(data):08} 05 {part[0]} {len(words):02x} {listed} 001 @ 00000001 n 0000 | a gloss\n".encode()
        (folder / f"data.{part}").write_bytes(data)
        index = ""
        for word, at in offsets.items():
            senses = [f"{offset:08}" for offset in dict.fromkeys(at)]
            index += f"{word} {part[0]} {len(senses)} 1 @ {len(senses)} 0 {' '.join(senses)}  \n"
        (folder / f"index.{part}").write_text("  1 A licence.\n" + index)
    (folder / "cntlist.rev").write_text("\n".join(TAGGED) + "\n")
    return folder


class TestWordNet:
    @pytest.mark.parametrize(
        ("word", "part", "synonyms"),
        [
            ("film", "noun", ["movie", "coat"]),  # both senses, without the synonym of two words
            ("Film", "noun", ["movie", "coat"]),
            ("good", "adj", ["fine", "honest"]),  # tagged more often as an adjective; "Good" is the word itself
            ("well", "adv", ["good"]),
            ("light", "adj", ["pale", "airy"]),  # never tagged: the part of speech with the most senses
            ("films", None, []),
            ("unheard", None, []),
        ],
    )
    def test_synonyms(self, tmp_path, word, part, synonyms):
        wordnet = WordNet(write_wordnet(tmp_path))
        assert wordnet.part_of_speech(word) == part
        assert wordnet.synonyms(word) == synonyms

    @pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's wordnet-base, which is not installed")
    def test_the_real_database(self):
        wordnet = WordNet(find_wordnet(None))
        assert wordnet.synonyms("movie") == ["film", "picture", "pic", "flick"]
        assert wordnet.part_of_speech("good") == "adj"

    def test_nowhere(self, tmp_path):
        with pytest.raises(RecipeError, match=r"are not in .*wordnet-base"):
            find_wordnet(str(tmp_path))

    @pytest.mark.parametrize("broken", ["index.adv", "cntlist.rev"])
    def test_incomplete(self, tmp_path, broken):
        (write_wordnet(tmp_path) / broken).unlink()
        with pytest.raises(RecipeError, match="must hold a complete WordNet database"):
            WordNet(tmp_path)


class Toy:
    """A model whose probability of label 1 is a sum over the words, and which counts what it is asked."""

    def __init__(self, start: float, **weights: float) -> None:
        self.start, self.weights, self.queries = start, weights, 0

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        self.queries += len(texts)
        sums = [self.start + sum(self.weights.get(word.lower(), 0) for word in text.split()) for text in texts]
        return np.array([[1 - p, p] for p in sums])


SYNONYMS = {"great": ["superb", "fine"], "film": ["movie", "picture"], "plot": ["story"]}
WEIGHTS = {"great": 0.3, "film": 0.1, "superb": 0.35, "fine": 0.2, "movie": -0.05, "picture": 0.05, "story": -0.02}


def attack(text: str, label: int, model: Toy, synonyms: dict[str, list[str]] = SYNONYMS):
    return pwws(text, label, model, lambda word: synonyms.get(word.lower(), []), "[UNK]")


class TestPwws:
    """Of "great plot film", saliencies are 0.3, 0, 0.1, so their softmax 0.391, 0.289, 0.320; the best substitutes
    fine, story, movie lower the probability by 0.10, 0.02, 0.15, so the scores are 0.039, 0.006, 0.048: film first,
    then great, then plot."""

    @pytest.mark.parametrize(
        ("start", "text", "success", "replaced"),
        [
            (0.24, "great plot movie", True, 1),  # 0.64 - 0.15 is below a half
            (0.30, "fine plot movie", True, 2),  # 0.70 - 0.15 is not
            (0.36, "fine story movie", True, 3),  # 0.76 - 0.15 - 0.10 - 0.02 = 0.49
            (0.50, "fine story movie", False, 3),
        ],
    )
    def test_greedy_order(self, start, text, success, replaced):
        model = Toy(start, **WEIGHTS)
        found = attack("great plot film", 1, model)
        assert (found.text, found.success, found.replaced, found.words) == (text, success, replaced, 3)
        assert found.queries == 1 + 3 + 5 + replaced

    def test_a_salient_word_goes_before_one_that_lowers_the_probability_more(self):
        """With movie at -0.01 the falls are 0.10 and 0.11, the scores 0.039 and 0.035."""
        found = attack("great plot film", 1, Toy(0.19, **{**WEIGHTS, "movie": -0.01}))
        assert found.text == "fine plot film"

    def test_the_other_label(self):
        """Probabilities of label 0, 0.4 and upwards; superb is now the better substitute, by 0.05."""
        found = attack("great plot film", 0, Toy(0.08, **WEIGHTS))
        assert (found.text, found.success) == ("superb plot film", True)

    def test_the_rest_of_the_text_stays_to_the_letter(self):
        found = attack(
            "  A Great plot -- and GREAT film's 's 2nd film?!", 1, Toy(0.5, **WEIGHTS), {**SYNONYMS, "s": ["sulfur"]}
        )
        assert found.text == "  A Fine story -- and FINE film's 's 2nd movie?!"
        assert found.words == 9  # a, great, plot, and, great, film's, s, nd, film

    def test_nothing_to_replace(self):
        model = Toy(0.5)
        found = attack("it is in a", 1, model, {"it": ["trade"], "in": ["inch"], "a": ["ampere"], "is": ["be"]})
        assert (found.text, found.success, found.replaced, found.queries) == ("it is in a", False, 0, 0)
        assert model.queries == 0

    def test_function_words(self):
        assert {"the", "in", "it", "not"} <= FUNCTION_WORDS
        assert not {"serious", "empty", "film"} & FUNCTION_WORDS


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    encoder = save_tiny_encoder(folder / "encoder")
    for method in ("houlsby", "full"):
        run(glue, "--model_name", encoder, "--output_dir", folder / method, "--method", method, "--max_steps", 4,
            "--report_to", "none", "--save_strategy", "no", "--load_best_model_at_end", "false",
            "--eval_strategy", "no")  # fmt: skip
    return folder


class TestCommand:
    def test_two_runs(self, finished_run, tmp_path):
        folders = [finished_run / method for method in ("houlsby", "full")]
        run(robustness, "--run", *folders, "--wordnet", write_wordnet(tmp_path), "--output_dir", tmp_path,
            "--max_eval_samples", 40, "--name", "adapters", "full")  # fmt: skip
        rows = [json.loads(line) for line in (tmp_path / "robustness.jsonl").read_text().splitlines()]
        assert [row["run"] for row in rows] == ["adapters", "full"]
        for row in rows:
            assert row["examples"] == 40
            assert row["attacked"] == len(row["attacks"]) == round(40 * row["accuracy"])
            assert row["successes"] == sum(attack["success"] for attack in row["attacks"])
            assert row["success_rate"] == row["successes"] / row["attacked"]
        assert (tmp_path / "robustness.png").is_file()
        assert (tmp_path / "robustness.svg").is_file()

    def test_dry_run(self, finished_run, capsys, tmp_path):
        run(robustness, "--run", finished_run / "full", "--wordnet", tmp_path, "--dry_run")
        expected = f"{finished_run / 'full'}: full, minimal_pairs, {finished_run / 'encoder'}\n"
        assert capsys.readouterr().out == expected

    @pytest.mark.parametrize("start", ["adapter", "model"])
    def test_epochs_of_pretraining(self, tmp_path, start):
        """Of a checkpoint, of the epoch that validation has chosen, and of the last one."""
        for folder in ("checkpoint-20", start, "encoder"):
            (tmp_path / folder).mkdir()

        def epochs(folder: Path) -> float | None:
            adapter, model = (str(folder), "tiny") if start == "adapter" else (None, str(folder))
            return robustness.pretraining_epochs({"model": model, "arguments": {"init_adapter": adapter}})

        (tmp_path / "checkpoint-20" / "trainer_state.json").write_text('{"epoch": 0.5}')
        assert epochs(tmp_path / "checkpoint-20") == 0.5
        for best, expected in ((1.0, 1.0), (None, 2.0)):
            content = {"task": "mlm", "best_epoch": best, "epochs": [{"epoch": 1.0}, {"epoch": 2.0}]}
            (tmp_path / "results.json").write_text(json.dumps(content))
            assert epochs(tmp_path / start) == expected
        (tmp_path / "results.json").unlink()
        assert epochs(tmp_path / start) == (None if start == "adapter" else 0)

    def test_lines_by_epochs_of_pretraining(self):
        rows = [
            {"run": f"{method}{epochs}", "method": method, "pretraining_epochs": epochs, "task": "sst2",
             "examples": 200, "success_rate": 0.8 - epochs / 10, "standard_error": 0.02}
            for method in ("full", "houlsby") for epochs in (2, 0, 1)
        ]  # fmt: skip
        figure = robustness.draw(rows)
        bars, lines = figure.axes
        assert len(bars.patches) == 6
        assert [container.get_label() for container in lines.containers] == ["full fine-tuning", "adapters"]
        assert [*lines.containers[0].lines[0].get_ydata()] == pytest.approx([80, 70, 60])
        assert "200 texts, no named entities" in figure.get_suptitle()
        assert len(robustness.draw([row for row in rows if not row["pretraining_epochs"]]).axes) == 1

    def test_batches_do_not_change_the_order(self, finished_run):
        one = load_run(str(finished_run / "houlsby"))
        texts = one.validation["sentence"][:9]
        alone = np.concatenate([robustness.predictor(one, 1)([text]) for text in texts])
        np.testing.assert_allclose(robustness.predictor(one, 4)(texts), alone, atol=1e-5)

    def test_a_name_for_each_run(self, finished_run):
        with pytest.raises(RecipeError, match="got 2 names for 1 runs"):
            run(robustness, "--run", finished_run / "houlsby", "--name", "a", "b")
