"""The command line calls the library's functions and prints errors as one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import houlsby_peft
from edited_json import edited_json
from houlsby_peft import AdapterError, HubError
from houlsby_peft_cli import main
from hub_models import BASE, TEXTS, make_adapter


ROOT = Path(__file__).parents[2]


@pytest.fixture
def adapter(base, tmp_path):
    return make_adapter(tmp_path / "adapter", base)


def command(arguments):
    """Client: run the command; return its exit status and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as error:
            return 1, out.getvalue(), f"{err.getvalue()}{error.code}"
    return 0, out.getvalue(), err.getvalue()


def run(hub, home, *arguments):
    return hub.call(command, [*map(str, arguments)], home=home)


def test_push_updates_a_repository_and_keeps_what_people_wrote(hub, base, adapter, tmp_path):
    hub.add(BASE, base)
    options = ("--metadata", "language=en", "license=mit", "--example", "How late is the train?")
    status, printed, error = run(hub, tmp_path, "push", adapter, "messages", *options)
    assert status == 0, error
    repo = hub.store.repos["user/messages"]
    first = repo.head
    assert printed.strip() == f"{hub.url}/user/messages/commit/{first.oid}"
    assert "texts = 'How late is the train?'" in first.files["README.md"].decode()

    edited = first.files["README.md"].decode() + "\n## Who made it\n\nWe did.\n"
    repo.commit(
        "by hand", {"README.md": edited.replace("license: mit", "license: cc-by-4.0").encode()}
    )
    make_adapter(adapter, base, seed=2)
    (adapter / "training_args.bin").write_bytes(b"pickled")
    (adapter / "optimizer.pt").write_bytes(b"pickled")
    (adapter / "loss.png").write_bytes(b"a picture")
    (adapter / "trainer_state.json").write_text("{}")
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"epochs": [{"epoch": 1.0, "step": 9, "accuracy": 0.5}]}))
    status, _, error = run(hub, tmp_path, "push", adapter, "user/messages", "--results", results)
    assert status == 0, error
    card = ModelCard(repo.head.files["README.md"].decode())
    assert card.text.endswith("part. -->\n\n## Who made it\n\nWe did.\n")
    assert "| accuracy | 0.500 |" in card.text
    assert "](loss.png)" in card.text
    assert "late is the train" not in card.text
    assert card.data.license == "cc-by-4.0"
    assert repo.head.files["adapter_model.safetensors"] != first.files["adapter_model.safetensors"]
    assert set(repo.head.files) - set(first.files) == {"loss.png"}
    assert len(repo.commits) == 4


@pytest.mark.parametrize("pairs", [False, True])
def test_card_writes_the_page_into_the_folder(pairs, base, tmp_path, capsys):
    adapter = make_adapter(tmp_path, base, str(base))
    texts = [text for text, _ in TEXTS[:4]]
    command = ["card", str(adapter), "user/messages", "--base-model", BASE, "--example", *texts]
    main([*command, *(["--pairs"] if pairs else [])])
    assert capsys.readouterr().out.strip() == str(adapter / "README.md")
    card = ModelCard.load(adapter / "README.md")
    assert card.data.base_model == BASE
    inputs = [(texts[0], texts[1]), (texts[2], texts[3])] if pairs else texts
    answers = houlsby_peft.load(adapter).predict(inputs)
    assert "```text\n" + "\n".join(map(str, answers)) + "\n```" in card.text


def test_the_example_of_a_card_where_the_recorded_base_is_gone(hub, base, tmp_path):
    hub.add(BASE, base)
    adapter = make_adapter(tmp_path / "adapter", base, str(tmp_path / "gone"))
    text = TEXTS[0][0]
    answer = str(houlsby_peft.load(adapter, base_model=str(base)).predict(text)[0])
    command = [adapter, "user/gone", "--example", text, "--base-model"]
    status, _, error = run(hub, tmp_path, "card", *command, BASE)
    assert status == 0, error
    assert answer in (adapter / "README.md").read_text()
    status, _, error = run(hub, tmp_path, "push", *command, BASE)
    assert status == 0, error
    assert answer in hub.store.repos["user/gone"].head.files["README.md"].decode()


@pytest.fixture
def predict(base, adapter, capsys, monkeypatch):
    """Run the command with words, and with lines of the standard input; return the predictions."""

    def run_command(*words, lines=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        main(["predict", str(adapter), "--base-model", str(base), *words])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run_command


def test_predict_reads_texts_and_lines(predict, base, adapter):
    texts = [text for text, _ in TEXTS[:4]]
    expected = houlsby_peft.load(adapter, base_model=str(base)).predict(texts)
    assert predict(*texts) == expected
    assert predict("-", lines=[*texts, "", texts[0]]) == [*expected, None, expected[0]]


def test_predict_reads_pairs_from_lines(predict, base, adapter):
    pairs = [(TEXTS[0][0], TEXTS[1][0]), (TEXTS[2][0], TEXTS[3][0])]
    lines = ["\t".join(pair) for pair in pairs]
    expected = houlsby_peft.load(adapter, base_model=str(base)).predict(pairs)
    assert predict("--pairs", "-", lines=lines) == expected
    for wrong in ("one", "one\ttwo\tthree"):
        with pytest.raises(SystemExit, match="pair"):
            predict("--pairs", "-", lines=[lines[0], wrong, lines[1]])


def test_labels_and_errors_change_nothing_in_a_terminal(base, tmp_path, capsys):
    """ESC and CSI begin commands of a terminal, and U+202E turns the text after it around."""
    labels = ["\x1b[31mred", "\x9b2Jgone", "\u202etxet"]
    folder = make_adapter(tmp_path / "adapter", base, str(base))
    with edited_json(folder / "adapter_config.json") as config:
        config["id2label"] = dict(enumerate(labels))
    main(["predict", str(folder), "--top-k", "3", TEXTS[0][0]])
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\u202e"} & set(printed)
    assert sorted(item["label"] for item in json.loads(printed)) == sorted(labels)
    for kind in (AdapterError, HubError):
        assert str(kind("a\x1b[31m\n\tb\x9b")) == "a\ufffd[31m\n\tb\ufffd"


def test_evaluate_runs_the_recipe_of_the_run_with_its_metrics(tmp_path, monkeypatch, started):
    command = "accelerate launch recipes/token_classification.py --data train.conll"
    (tmp_path / "results.json").write_text(json.dumps({"command": command}))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.conll").touch()
    adapter, metrics = str(tmp_path / "adapter"), ["--metric", "seqeval", "my_metric.py"]
    main(["evaluate", adapter, "new.conll", *metrics])
    assert Path(started[1]) == ROOT / "recipes" / "token_classification.py"
    flags = ["--evaluate", adapter, "--data", "new.conll", "--output_dir", str(tmp_path)]
    assert started[2:] == [*flags, *metrics]


def test_an_error_shows_its_traceback_only_if_asked_for(adapter, tmp_path, monkeypatch):
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"truncated")
    with pytest.raises(SystemExit, match="error: "):
        main(["card", str(adapter)])
    with pytest.raises(AdapterError, match="header"):
        main(["card", str(adapter), "--debug"])
    monkeypatch.setenv("HOULSBY_DEBUG", "1")
    with pytest.raises(AdapterError, match="header"):
        main(["card", str(adapter)])


@pytest.mark.parametrize("flag", ["--help", "--version", "push --help", "predict --help"])
def test_the_help_imports_neither_the_package_nor_what_it_needs(flag):
    code = """
import sys
from houlsby_peft_cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "peft", "transformers", "huggingface_hub", "numpy", "houlsby_peft"}
    print(sorted(heavy & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, *flag.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    beginning = "usage: houlsby-peft "
    if flag == "--version":
        beginning = f"houlsby-peft {houlsby_peft.__version__}"
    assert done.stdout.startswith(beginning)
    assert flag != "predict --help" or "--output" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_flags_may_have_underscores(base, adapter, capsys):
    text = TEXTS[0][0]
    for flag in (
        ["--base-model", str(base)],
        [f"--base_model={base}"],
        ["--base_model", str(base), "--top_k", "2"],
    ):
        main(["predict", str(adapter), *flag, "--", text, "--a_b"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == lines[2:4]
    assert [line[0]["label"] for line in lines[4:]] == [line["label"] for line in lines[:2]]


def test_a_reader_that_stops_early_is_no_error(adapter):
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "houlsby_peft_cli", "card", str(adapter)]
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.close(writing)
    assert done.returncode == 0, done.stderr
    assert "BrokenPipeError" not in done.stderr


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["train", "nothing.xlsx"], "nothing.xlsx"),
        (["evaluate", "run", "./nothing"], "./nothing"),
        (["train", ".", "--recipe", "poems"], "--recipe"),
        (["train", ".", "--epoch", "3"], "--epochs"),
        (["train", ".", "--nonsense"], "--help-all"),
        (["predict", "a/b/c", "text"], "a/b/c"),
        (["predict", "user/adapter", "text", "--device", "abacus"], "--device"),
    ],
)
def test_mistakes_are_said_before_anything_is_loaded(words, word, monkeypatch):
    monkeypatch.setattr("houlsby_peft.saved.adapter.SavedAdapter.open", None)
    with pytest.raises(SystemExit, match=f"^error: .*{word}"):
        main(words)


@pytest.fixture
def started(monkeypatch):
    """The words with which a program was started."""
    words = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: words.extend(arguments))
    return words


@pytest.mark.parametrize(
    "flags", [["--recipe", "squad"], ["--recipe=squad"], ["--r", "8", "--recipe", "squad"]]
)
def test_the_recipe_may_follow_the_data(flags, tmp_path, started):
    (tmp_path / "data.csv").write_text("text\na\n")
    main(["train", str(tmp_path / "data.csv"), *flags])
    assert started[1].endswith("squad.py")
    assert "--recipe" not in " ".join(started)
    assert ("8" in started) == ("8" in flags)


def test_flags_are_spelled_as_people_know_them(tmp_path, monkeypatch, started):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "b.csv"):
        Path(name).write_text("text\na\n")
    flags = ["--text-columns", "text", "--model=x", "--lr", "-1", "--do_eval"]
    main(["train", "a.csv", "b.csv", *flags])
    assert started[2:] == [
        *("--data", "a.csv", "--do_train", "--more_data", "b.csv", "--text_columns", "text"),
        *("--model_name=x", "--learning_rate", "-1", "--do_eval"),
    ]


def test_words_that_are_no_command(capsys):
    for words, meant in ((["trian"], "train"), (["predict", "x", "y", "--devise"], "--device")):
        with pytest.raises(SystemExit):
            main(words)
        assert f"did you mean {meant}?" in capsys.readouterr().err
