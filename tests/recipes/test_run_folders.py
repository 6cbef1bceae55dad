"""Folders of runs tell the truth: damaged ones, shared ones, unusable ones; and what is claimed is what was saved."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import glue
import mlm
import squad
import stream
import text_classification
import token_classification
from recipe_runs import run, save_tiny_encoder
from tasks.glue import TASKS
from tasks.minimal_pairs import minimal_pairs
from training.checkpoints import SEAL, find_checkpoint_damage, last_checkpoint
from training.errors import RecipeError
from training.model import load_saved
from training.runs import LOCK_FILE, changed_arguments
from training.trained_on import changed_files


RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 3  # per epoch
EPOCHS = 3


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A task for a tiny model with dropout: 3 epochs of 3 steps. All checkpoints are kept, and the first is the best:
    as the labels of both splits are opposite, the loss grows with what is learned."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "data" / "cola").mkdir(parents=True)
    frame = minimal_pairs()["train"].select(range(8 * STEPS)).to_pandas()[["sentence", "label"]]
    for split, common in (("train", 1), ("validation", 0)):
        frame["label"] = [1 - common, *[common] * (len(frame) - 1)]
        frame.to_csv(folder / "data" / "cola" / f"{split}.csv", index=False)
    model = save_tiny_encoder(folder / "model")
    return [
        *("--task", "cola", "--data_dir", folder / "data", "--model_name", model, "--use_cpu", "--disable_tqdm", True),
        *("--num_train_epochs", EPOCHS, "--learning_rate", 1e-2, "--per_device_train_batch_size", 8),
        *("--save_total_limit", EPOCHS, "--metric_for_best_model", "loss"),
    ]


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory):
    """The folder of a finished run, which nobody changes."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    run(glue, *flags, "--output_dir", folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the finished run under another name, so that no path in it may be trusted."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def interrupt(folder):
    """Make a finished run one that was interrupted in its last epoch."""
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "adapter")
    shutil.rmtree(folder / f"checkpoint-{STEPS * EPOCHS}")


def results(folder):
    """The content of results.json, without the times of the training."""
    found = json.loads((folder / "results.json").read_text())
    for epoch in found["epochs"]:
        del epoch["seconds"]
    return found


def assert_same_end(folder, finished):
    """What was saved and what is claimed are those of the run that nothing has happened to."""
    here, there = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (folder, finished))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in there)
    for name in ("epochs", "best_epoch", "best_score", "best_scores", "files"):
        assert results(folder)[name] == results(finished)[name]


DAMAGES = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    # As on some file systems after a loss of power: the size is right.
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


class TestDamagedCheckpoints:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_every_file_counts(self, finished, tmp_path, damage):
        names = [path.name for path in (finished / f"checkpoint-{STEPS}").iterdir()]
        assert {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", SEAL} <= set(names)
        for name in names:
            checkpoint = tmp_path / name / f"checkpoint-{STEPS}"
            shutil.copytree(finished / checkpoint.name, checkpoint)
            assert find_checkpoint_damage(checkpoint) is None
            DAMAGES[damage](checkpoint / name)
            assert name in find_checkpoint_damage(checkpoint)

    def test_the_newest_usable_one_is_the_last(self, finished, folder, capsys):
        newest, middle, oldest = (folder / f"checkpoint-{STEPS * epoch}" for epoch in (3, 2, 1))
        assert last_checkpoint(folder) == str(newest)
        (folder / "checkpoint-best").mkdir()
        (folder / "checkpoint-100").mkdir()
        (newest / "optimizer.pt").unlink()
        middle.rename(folder / "checkpoint-50")
        assert last_checkpoint(str(folder)) == str(oldest)
        assert capsys.readouterr().out.splitlines() == [
            f"Skipping {folder / 'checkpoint-100'}: it is incomplete: it has no whole {SEAL}, which is written last.",
            f"Skipping {folder / 'checkpoint-50'}: it was saved at step 6.",
            f"Skipping {newest}: it is damaged: optimizer.pt is missing.",
        ]

    def test_there_is_none(self, tmp_path):
        assert last_checkpoint(tmp_path) is None
        assert last_checkpoint(tmp_path / "absent") is None

    def test_the_best_one_is_gone(self, flags, finished, folder, capsys):
        """The newer ones are whole, but no run can end with the best weights from them."""
        assert results(finished)["best_epoch"] == 1
        interrupt(folder)
        shutil.rmtree(folder / "checkpoint-3")
        assert last_checkpoint(folder) == str(folder / "checkpoint-6")
        run(glue, *flags, "--output_dir", folder)
        printed = capsys.readouterr().out
        assert "checkpoint-6: the best checkpoint before it, checkpoint-3, cannot be used: there is no such" in printed
        assert "no checkpoint to resume from: the run starts over" in printed
        assert_same_end(folder, finished)

    def test_the_best_one_goes_during_the_run(self, flags, folder, monkeypatch):
        interrupt(folder)
        evaluate = glue.RecipeTrainer.evaluate

        def lose(trainer, *args, **kwargs):
            DAMAGES["cut"](folder / "checkpoint-3" / "adapter_model.safetensors")
            return evaluate(trainer, *args, **kwargs)

        monkeypatch.setattr(glue.RecipeTrainer, "evaluate", lose)
        with pytest.raises(RecipeError, match=r"checkpoint-3 cannot be loaded: .*adapter_model.safetensors has .* of"):
            run(glue, *flags, "--output_dir", folder)
        assert not (folder / "results.json").exists()

    def test_weights_alone_are_no_checkpoint_to_resume_from(self, flags, tmp_path, capsys):
        run(glue, *flags, "--save_only_model", True, "--output_dir", tmp_path)
        assert find_checkpoint_damage(tmp_path / "checkpoint-3", resume=False) is None
        assert last_checkpoint(tmp_path) is None
        assert "--save_only_model has left out the state of the optimizer" in capsys.readouterr().out

    def test_a_damaged_one_that_was_asked_for(self, flags, folder):
        (folder / "checkpoint-6" / "rng_state.pth").unlink()
        with pytest.raises(
            RecipeError, match=r"complete checkpoint or 'last', got .*checkpoint-6: .*rng_state.pth is"
        ):
            run(glue, *flags, "--output_dir", folder, "--resume_from_checkpoint", folder / "checkpoint-6")

    def test_what_an_earlier_attempt_left_is_replaced(self, flags, finished, folder):
        interrupt(folder)
        (folder / "checkpoint-9" / "optimizer.pt").mkdir(parents=True)
        run(glue, *flags, "--output_dir", folder)
        assert find_checkpoint_damage(folder / "checkpoint-9", load_best=True) is None
        assert_same_end(folder, finished)


class TestDamagedFolders:
    @pytest.mark.parametrize(
        ("name", "message"),
        [("adapter", "adapter/adapter_config.json is missing"), ("results.json", "results.json is damaged")],
    )
    def test_a_finished_run_whose_files_are_gone_is_finished_again(
        self, flags, finished, folder, name, message, capsys
    ):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.write_text("")
        run(glue, *flags, "--output_dir", folder)
        printed = capsys.readouterr().out
        assert f"{folder} holds this run, but {message}: it does not count as finished.\n" in printed
        assert f"Resuming from {folder / 'checkpoint-9'}.\n" in printed
        assert_same_end(folder, finished)

    def test_the_page_of_an_adapter_may_be_edited(self, flags, folder, capsys):
        (folder / "adapter" / "README.md").write_text("Edited")
        run(glue, *flags, "--output_dir", folder)
        assert "finished: nothing is trained" in capsys.readouterr().out

    @pytest.mark.parametrize("content", ["", "{", "[1]", None])
    def test_unknown_arguments_are_refused(self, flags, folder, content):
        path = folder / "arguments.json"
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(RecipeError, match=r"unknown arguments \(it has no whole arguments.json\)\. Give another"):
            run(glue, *flags, "--output_dir", folder)

    @pytest.mark.parametrize("left", ["nothing", "an incomplete checkpoint"])
    def test_a_corrected_command_after_an_early_death(self, flags, tmp_path, left):
        """Nothing was trained with the other arguments, so there is nothing to lose."""
        (tmp_path / "arguments.json").write_text('{"learning_rate": 1000000.0}')
        if left != "nothing":
            (tmp_path / "checkpoint-3").mkdir()
            (tmp_path / "checkpoint-3" / "adapter_config.json").write_text("{")
        run(glue, *flags, "--max_steps", 1, "--output_dir", tmp_path)
        arguments = json.loads((tmp_path / "arguments.json").read_text())
        assert set(arguments.pop("trained_on")["files"]) == {"train", "validation"}
        assert arguments.pop("rows_per_step") == 8
        assert arguments == results(tmp_path)["arguments"]

    def test_trained_weights_of_other_arguments_are_not_lost(self, flags, folder):
        interrupt(folder)
        with pytest.raises(RecipeError, match=r"holds a run with other arguments: seed was 42, is 1\."):
            run(glue, *flags, "--seed", 1, "--output_dir", folder)
        with pytest.raises(RecipeError, match="or --base_dtype with the earlier value"):
            run(glue, *flags, "--base_dtype", "bfloat16", "--output_dir", folder)
        with pytest.raises(RecipeError, match=r"base_dtype was .*, method was 'houlsby', is 'lora'") as error:
            run(glue, *flags, "--method", "lora", "--base_dtype", "bfloat16", "--output_dir", folder)
        assert "with the earlier value" not in str(error.value)

    @pytest.mark.parametrize(
        ("name", "value"), [("learning_rate", 1e-05), ("weight_decay", 0.5), ("metric_for_best_model", "accuracy")]
    )
    def test_what_a_checkpoint_restores_must_stay(self, flags, folder, name, value):
        """transformers takes the optimizer, the learning rate and the best score so far from the checkpoint."""
        changed = (*flags, f"--{name}", value, "--num_train_epochs", EPOCHS + 1, "--output_dir", folder)
        with pytest.raises(RecipeError, match=rf"other arguments: .*{name} was .*, is {value!r}.* to start over\.$"):
            run(glue, *changed)
        for checkpoint in ("last", folder / "checkpoint-6"):
            with pytest.raises(
                RecipeError, match=rf"must stay the same: {name} was [^,]*, is {value!r}\. Give the old"
            ):
                run(glue, *changed, "--resume_from_checkpoint", checkpoint)
        assert (folder / "results.json").exists()


def write_texts(path, classes, texts=None):
    """Write a file of 24 texts, each class as often as the others."""
    texts = minimal_pairs()["train"]["sentence"][:24] if texts is None else texts
    pd.DataFrame({"text": texts, "label": [*classes] * (24 // len(classes))}).to_csv(path, index=False)


class TestOtherData:
    """Files with other content are other data, under whatever name; the same content is the same data."""

    @pytest.fixture
    def command(self, flags, tmp_path):
        """The command of a run of two epochs, which has ended."""
        write_texts(tmp_path / "texts.csv", "ab")
        model = flags[flags.index("--model_name") + 1]
        command = (
            *("--data", tmp_path / "texts.csv", "--model_name", model, "--use_cpu", "--num_train_epochs", 2),
            *("--save_total_limit", 2, "--output_dir", tmp_path / "run"),
        )
        run(text_classification, *command)
        return command

    def interrupt(self, folder):
        (folder / "results.json").unlink()
        shutil.rmtree(folder / "adapter")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda file: write_texts(file, "ba"), "texts.csv has the same size and other content. Give"),
            (lambda file: write_texts(file, "ac"), "has the same size and other content, classes were a, b, are a, c"),
            (lambda file: write_texts(file, "abc"), "other content, classes were a, b, are a, b, c"),
            (lambda file: file.write_text(file.read_text() + "more,a\n"), r"texts.csv had 1,?\d+ bytes, has 1,?\d+"),
        ],
        ids=["other labels", "other names of the classes", "more classes", "more rows"],
    )
    @pytest.mark.parametrize("ended", [True, False], ids=["finished", "interrupted"])
    def test_are_refused(self, command, tmp_path, change, message, ended):
        folder = tmp_path / "run"
        if not ended:
            self.interrupt(folder)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        change(tmp_path / "texts.csv")
        with pytest.raises(RecipeError, match=f"holds a run with other data: data of train have changed: .*{message}"):
            run(text_classification, *command)
        for checkpoint in ("last", folder / "checkpoint-1"):  # its head has the old classes
            with pytest.raises(RecipeError, match="and the data must stay the same: data of train have changed: "):
                run(text_classification, *command, "--resume_from_checkpoint", checkpoint)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        run(text_classification, *command, "--overwrite_output_dir")
        labels = pd.read_csv(tmp_path / "texts.csv")["label"]
        assert results(folder)["labels"] == sorted(set(labels))

    def test_the_same_content_is_the_same_data(self, command, tmp_path, capsys):
        content = (tmp_path / "texts.csv").read_bytes()
        (tmp_path / "texts.csv").unlink()
        (tmp_path / "texts.csv").write_bytes(content)
        run(text_classification, *command)
        assert "holds this run, finished: nothing is trained." in capsys.readouterr().out
        (tmp_path / "texts.csv").rename(tmp_path / "moved.csv")
        run(text_classification, *command, "--data", tmp_path / "moved.csv", "--resume_from_checkpoint", "last")
        assert "Resuming from" in capsys.readouterr().out

    def test_runs_of_earlier_versions_are_accepted(self, command, tmp_path, capsys):
        """They have not recorded their data."""
        path = tmp_path / "run" / "arguments.json"
        arguments = json.loads(path.read_text())
        assert set(arguments.pop("trained_on")) == {"files", "classes"}
        path.write_text(json.dumps(arguments))
        write_texts(tmp_path / "texts.csv", "ba")
        run(text_classification, *command)
        assert "holds this run, finished: nothing is trained." in capsys.readouterr().out

    @pytest.mark.parametrize("recipe", [glue, mlm, squad, token_classification])
    def test_of_every_recipe(self, flags, tmp_path, recipe):
        model, rows = flags[flags.index("--model_name") + 1], minimal_pairs()["train"]["sentence"][:8]
        folder, data = tmp_path / "data" / "cola", {"sentence": rows, "label": [0, 1] * 4}
        if recipe is mlm:
            data = {"text": rows}
        elif recipe is token_classification:
            data = {"tokens": [row.split() for row in rows], "tags": [["A", *["B"] * row.count(" ")] for row in rows]}
        elif recipe is squad:
            answers = [{"text": [row.split()[0]], "answer_start": [0]} for row in rows]
            model = save_tiny_encoder(tmp_path / "model", max_position_embeddings=128)
            data = {"id": [*"abcdefgh"], "question": ["who"] * 8, "context": rows, "answers": answers}
        folder.mkdir(parents=True)
        pd.DataFrame(data).to_parquet(folder / "train.parquet")
        pd.DataFrame(data).to_parquet(folder / "validation.parquet")
        source = ("--task", "cola", "--data_dir", folder.parent) if recipe is glue else ("--data", folder)
        length = ("--max_length", 100, "--stride", 16) if recipe is squad else ()
        command = (recipe, *source, "--model_name", model, "--use_cpu", "--max_steps", 1, "--output_dir",
                   tmp_path / "run", *length)  # fmt: skip
        run(*command)
        run(*command)
        recorded = json.loads((tmp_path / "run" / "arguments.json").read_text())["trained_on"]["files"]
        assert changed_files(recorded) == []
        pd.DataFrame(data)[:7].to_parquet(folder / "validation.parquet")
        assert [change.split(":")[0] for change in changed_files(recorded)] == ["data of validation have changed"]
        with pytest.raises(RecipeError, match=r"other data: data of validation have changed: validation\.parquet"):
            run(*command)
        (folder / "validation.parquet").unlink()
        with pytest.raises(RecipeError, match=r"data of validation were in validation\.parquet, are in no file"):
            run(*command)

    def test_of_the_hub_only_the_classes_are_known(self):
        before, now = ({"trained_on": {"files": {}, "classes": classes}} for classes in (["a", "b"], ["a", "c"]))
        assert changed_arguments(before, now) == ["classes were a, b, are a, c"]
        local = {"trained_on": {"files": {"train": {"name": "a.csv", "bytes": 1, "crc32": 1}}, "classes": ["a", "b"]}}
        assert changed_arguments(before, local) == changed_arguments({}, local) == []


@pytest.mark.parametrize(
    "examples", [pytest.param(6, id="sample"), pytest.param(200, id="many", marks=pytest.mark.slow)]
)
def test_any_damage_ends_with_the_right_result_or_one_line(flags, finished, examples):
    files = sorted(path.relative_to(finished) for path in finished.rglob("*") if path.is_file())
    damages = st.lists(st.tuples(st.sampled_from(files), st.sampled_from(sorted(DAMAGES))), min_size=1, max_size=3)

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(damages=damages, interrupted=st.booleans())
    def rerun(damages, interrupted):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(shutil.copytree(finished, Path(name, "run")))
            if interrupted:
                interrupt(folder)
            for path, damage in damages:
                if (folder / path).exists():
                    DAMAGES[damage](folder / path)
            arguments = folder / "arguments.json"
            known = arguments.exists() and arguments.read_bytes() == (finished / arguments.name).read_bytes()
            trained = [folder / "results.json", *folder.glob("checkpoint-*/trainer_state.json")]
            if not known and any(path.exists() for path in trained):
                with pytest.raises(RecipeError, match=r"^.* unknown arguments .*$"):
                    run(glue, *flags, "--output_dir", folder)
                return
            run(glue, *flags, "--output_dir", folder)
            assert_same_end(folder, finished)

    rerun()


class TestWhatIsClaimedWasSaved:
    """results.json and the table name the score of the weights in adapter/."""

    @pytest.mark.parametrize(
        ("kept", "epoch", "saving"),
        [
            ("Last", None, ("--save_strategy", "no", "--load_best_model_at_end", False)),
            ("Last", None, ("--load_best_model_at_end", False)),
            ("Last", None, ("--load_best_model_at_end", False, "--eval_strategy", "steps", "--eval_steps", 4)),
            # Each evaluation has a checkpoint, though --save_steps, which is 500 in transformers, is not given.
            ("Best", 2 / 3, ("--eval_strategy", "steps", "--eval_steps", 2, "--save_strategy", "steps")),
            ("Best", 2 / 3, ("--eval_strategy", "steps", "--eval_steps", 2, "--save_strategy", "best")),
            ("Best", 1, ()),
        ],
        ids=[
            "no checkpoints",
            "the last epoch",
            "the last of 9 steps",
            "the best of 9 steps",
            "only better ones",
            "the best epoch",
        ],
    )
    def test_the_score(self, flags, tmp_path, kept, epoch, saving, capsys):
        run(glue, *flags, *saving, "--output_dir", tmp_path / "run")
        found = results(tmp_path / "run")
        losses = [entry["loss"] for entry in found["epochs"]]
        assert len(set(losses)) == len(losses)
        assert found["best_score"] == found["best_scores"]["loss"] == (min(losses) if kept == "Best" else losses[-1])
        assert found["best_epoch"] == epoch
        assert f"{kept} epoch: " in capsys.readouterr().out

        saved = tmp_path / "run" / "adapter"
        run(glue, *flags[:4], "--use_cpu", "--evaluate", saved, "--output_dir", tmp_path / "evaluated")
        again = json.loads((tmp_path / "evaluated" / "evaluation.json").read_text())["scores"]
        assert again == pytest.approx(found["best_scores"], rel=1e-5)


def test_an_encoder_that_is_given_is_taken(flags, tmp_path):
    """Also with an adapter of another method, which names its own."""
    run(glue, *flags, "--method", "lora", "--max_steps", 1, "--output_dir", tmp_path / "run")
    other = save_tiny_encoder(tmp_path / "other", seed=1)
    labels = TASKS["cola"].labels
    for name, expected in ((None, flags[flags.index("--model_name") + 1]), (str(other), other)):
        model, _ = load_saved(str(tmp_path / "run" / "adapter"), labels, name)
        weights = load_file(expected / "model.safetensors")["embeddings.word_embeddings.weight"]
        assert torch.equal(model.get_base_model().bert.embeddings.word_embeddings.weight, weights)


class TestOneRunPerFolder:
    def test_a_second_one_is_refused(self, flags, folder):
        interrupt(folder)
        with (folder / LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            print("process 1234 on a-host", file=lock, flush=True)
            for way in ((), ("--resume_from_checkpoint", "last"), ("--overwrite_output_dir",)):
                with pytest.raises(RecipeError, match=rf"^{folder} is in use by process 1234 on a-host\. Wait for"):
                    run(glue, *flags, "--output_dir", folder, *way)
            assert last_checkpoint(folder) == str(folder / "checkpoint-6"), "nothing is deleted"
        run(glue, *flags, "--output_dir", folder)
        with (folder / LOCK_FILE).open() as lock:
            assert lock.read() == f"process {os.getpid()} on {os.uname().nodename}\n"
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given up

    def test_a_stream(self, tmp_path):
        frame = minimal_pairs()["train"].to_pandas()[["sentence", "label"]]
        frame.to_csv(tmp_path / "a.csv", index=False)
        with (tmp_path / LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(RecipeError, match="is in use by another process"):
                run(stream, "--data", tmp_path / "a.csv", "--use_cpu", "--output_dir", tmp_path)


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [(glue, ("--task", "rte", "--data_dir")), *((one, ("--data",)) for one in (squad, mlm, token_classification))],
)
def test_an_output_folder_that_cannot_be_written(recipe, flags, tmp_path):
    """Before anything is loaded: there is no data."""
    (tmp_path / "file").touch()
    for name in ("file", "file/{task}", "x" * 300):
        with pytest.raises(RecipeError, match=r"--output_dir must be a folder that can be written, got .*\. Give"):
            run(recipe, *flags, tmp_path, "--use_cpu", "--output_dir", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


RECIPE = """
import signal, sys
sys.path.insert(0, {recipes!r})
from training.errors import end_with_one_line

def main():
    print("ready", flush=True)
    signal.sigtimedwait([], 30)

end_with_one_line(main)
"""


class TestInterrupts:
    def start(self, before=""):
        """Start a recipe that only waits; `before` runs as its parent would, before it."""
        code = f"import signal; {before}\nexec({RECIPE.format(recipes=str(RECIPES))!r})"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        return process

    @pytest.mark.parametrize(
        ("number", "status", "line"),
        [(signal.SIGINT, 130, "Interrupted. The same"), (signal.SIGTERM, 143, "Terminated. The same")],
    )
    def test_one_line_says_how_to_go_on(self, number, status, line):
        process = self.start("signal.signal(signal.SIGINT, signal.default_int_handler)")
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == status
        assert errors.strip().startswith(line)
        assert len(errors.strip().splitlines()) == 1

    def test_a_signal_that_is_ignored_stays_ignored(self):
        """As SIGINT is under nohup and in the background of a script."""
        process = self.start("signal.signal(signal.SIGINT, signal.SIG_IGN)")
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
        process.communicate()

    def test_only_the_first_process_of_several_speaks(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        process = self.start()
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == 143


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize("kills", [pytest.param(2, id="sample"), pytest.param(40, id="many", marks=pytest.mark.slow)])
def test_runs_that_are_killed_at_any_change_of_a_file(kills):
    script = Path(__file__).parents[1] / "support" / "killed_runs.py"
    process = subprocess.run(
        [sys.executable, script, "--kills", str(kills)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert f"{kills} of {kills} killed runs are identical." in process.stdout
