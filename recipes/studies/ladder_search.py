r"""Compare designs of a ladder, a narrow network beside a frozen encoder, on tasks of GLUE.

    python recipes/studies/ladder_search.py --data_dir glue --states states --runs runs.txt \
        --output ladder.csv

A ladder (side tuning: Sung et al. 2022, arXiv 2206.06522) reads the hidden states of a frozen
encoder and keeps a narrow state of its own. The encoder never meets it, so its hidden states are
computed once for each task, and kept in half precision in `--states`: some 0.6 to 1.3 GB per task.

Each line of `--runs` is one run, such as `task=cola width=96 cell=attention seed=1`; options that
are not named have the defaults of `Design`. A line is appended to `--output` after each run, and
runs that it has are skipped. Lines may be added to `--runs` while the script is running.
"""

import argparse
import csv
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

import recipes_path  # noqa: F401
from houlsby_peft.saved.downloads import find_packaged
from tasks.glue_tasks import TASK_SCORES, TASKS
from tasks.scores import SCORES


ENCODER = "minilm"
EPOCHS = {"cola": 6, "mrpc": 5, "stsb": 5, "rte": 5, "sst2": 3}
MOST_EXAMPLES = {"sst2": 10_000}
BATCH = 32
HEAD_WIDTH = 32


@dataclass(frozen=True)
class Design:
    """One run: a task, a ladder and how it is trained. The defaults are those of the library's kind
    "ladder".

    Args:
        cell: What follows each reading: "attention" and a bottleneck, the attention "alone", a
            bottleneck ("mlp"), or nothing ("none").
        step: Every how many layers' hidden states are read.
        reads_last: Whether the last hidden states are read as well, and not only met at the end.
        mix: How what is read joins the state: with a trained "gate", or as a "sum".
        inner: The width inside of the bottlenecks, relative to `width`.
        output: Which state meets the last hidden state of the [CLS] token: its own ("cls"), the
            "mean" of all, or the sum of "both".
        new_pooler: Whether the pooler starts at random, not as the encoder's.
        start: The first weights of the cells: "random", or "pruned" from the encoder's own.
        epochs: 0: those of the first table in docs/results.md.
    """

    task: str
    width: int = 96
    cell: str = "attention"
    step: int = 1
    reads_last: bool = False
    mix: str = "gate"
    inner: float = 2
    output: str = "cls"
    new_pooler: bool = False
    start: str = "random"
    init_std: float = 0.01
    dropout: float = 0.0
    learning_rate: float = 1e-3
    epochs: int = 0
    seed: int = 0

    @classmethod
    def from_line(cls, line: str) -> "Design":
        """Read a line of `--runs`."""
        defaults = vars(cls(task=""))
        values: dict[str, Any] = {}
        for option in line.split():
            name, _, value = option.partition("=")
            if isinstance(defaults[name], bool):
                values[name] = value == "True"
            else:
                values[name] = type(defaults[name])(value)
        return cls(**values)


class States:
    """A split of a task: the hidden states of all tokens, `(tokens, layers + 2, d)`, and labels.

    The states are normalized without weights. The last one is the sum before the last norm, as it
    is.
    """

    def __init__(self, path: Path) -> None:
        self.lengths = np.load(path / "lengths.npy")
        self.labels = torch.from_numpy(np.load(path / "labels.npy"))
        self.starts = np.concatenate(([0], self.lengths.cumsum()))
        self.tokens = np.load(path / "tokens.npy", mmap_mode="r")

    def batch(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states `(rows, layers + 2, tokens, d)` and the mask `(rows, tokens)`."""
        longest = self.lengths[rows].max()
        _, layers, width = self.tokens.shape
        states = torch.zeros(len(rows), longest, layers, width)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for position, row in enumerate(rows):
            start, length = self.starts[row], self.lengths[row]
            states[position, :length] = torch.from_numpy(
                np.array(self.tokens[start : start + length])
            )
            mask[position, :length] = True
        return states.transpose(1, 2), mask

    def batches(self, generator: np.random.Generator | None = None) -> Iterator[np.ndarray]:
        """Yield the rows of batches of about equal lengths; in random order with a generator."""
        if generator is None:
            order = self.lengths.argsort()
            yield from np.split(order, range(2 * BATCH, len(order), 2 * BATCH))
            return
        # As transformers' group_by_length: sorted within random groups of 50 batches.
        order = generator.permutation(len(self.lengths))
        batches: list[np.ndarray] = []
        for start in range(0, len(order), 50 * BATCH):
            group = order[start : start + 50 * BATCH]
            group = group[self.lengths[group].argsort()]
            batches += np.split(group, range(BATCH, len(group), BATCH))
        for number in generator.permutation(len(batches)):
            yield batches[number]


def save_states(task_name: str, data_dir: str, folder: Path) -> None:
    """Compute and save the states of both splits of a task."""
    task = TASKS[task_name].load(data_dir, True, MOST_EXAMPLES.get(task_name))
    name = find_packaged(ENCODER)
    tokenizer, encoder = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()
    sums: list[torch.Tensor] = []
    encoder.encoder.layer[-1].output.LayerNorm.register_forward_pre_hook(
        lambda _, args: sums.append(args[0])
    )
    for split in ("train", "validation"):
        data, path = task.splits[split], folder / task_name / split
        path.mkdir(parents=True, exist_ok=True)
        texts = [list(data[column]) for column in task.text_columns]
        rows = tokenizer(*texts, truncation=True, max_length=128)
        lengths = np.array([len(ids) for ids in rows["input_ids"]])
        starts = np.concatenate(([0], lengths.cumsum()))
        config = encoder.config
        shape = (int(starts[-1]), config.num_hidden_layers + 2, config.hidden_size)
        tokens = np.lib.format.open_memmap(path / "tokens.npy", "w+", np.float16, shape)
        order = lengths.argsort()
        for batch in np.split(order, range(64, len(order), 64)):
            inputs = tokenizer.pad(
                {key: [rows[key][row] for row in batch] for key in rows}, return_tensors="pt"
            )
            sums.clear()
            with torch.no_grad():
                hidden = encoder(**inputs, output_hidden_states=True).hidden_states
            normalized = [F.layer_norm(state, state.shape[-1:]) for state in hidden]
            states = torch.stack([*normalized, sums[0]], 2).half().numpy()
            for position, row in enumerate(batch):
                tokens[starts[row] : starts[row + 1]] = states[position, : lengths[row]]
        np.save(path / "labels.npy", np.array(data["label"]))
        np.save(path / "lengths.npy", lengths)


class Cell(nn.Module):
    """One narrow layer, with its norms first."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        width = design.width
        self.heads = max(1, width // HEAD_WIDTH)
        self.dropout = design.dropout
        self.attention = self.bottleneck = None
        if design.cell in ("attention", "alone"):
            self.attention = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)])
            self.attention_norm = nn.LayerNorm(width)
        if design.cell in ("attention", "mlp"):
            inner = int(design.inner * width)
            self.bottleneck = nn.ModuleList([nn.Linear(width, inner), nn.Linear(inner, width)])
            self.norm = nn.LayerNorm(width)

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Transform states `(rows, tokens, width)`."""
        if self.attention is not None:
            project, output = self.attention
            parts = project(self.attention_norm(state)).unflatten(-1, (3, self.heads, -1))
            query, key, value = parts.permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(query, key, value, mask)
            branch = output(attended.transpose(1, 2).flatten(2))
            state = state + F.dropout(branch, self.dropout, self.training)
        if self.bottleneck is not None:
            down, up = self.bottleneck
            branch = up(F.gelu(down(self.norm(state))))
            state = state + F.dropout(branch, self.dropout, self.training)
        return state


class Ladder(nn.Module):
    """A ladder and a head on cached states."""

    def __init__(self, design: Design, encoder: Any, outputs: int) -> None:
        super().__init__()
        layers, width = encoder.config.num_hidden_layers, encoder.config.hidden_size
        self.design = design
        self.read = list(range(0, layers, design.step))
        if design.reads_last:
            self.read.append(layers)
        self.down = nn.ModuleList([nn.Linear(width, design.width) for _ in self.read])
        self.gates = nn.Parameter(torch.zeros(len(self.read)))
        # If the last states are read, the first ones are alone without a cell: as many in all.
        cells: list[nn.Module] = [Cell(design) for _ in self.read]
        if design.reads_last:
            cells[0] = Cell(Design("", cell="none"))
        self.cells = nn.ModuleList(cells)
        self.up = nn.Linear(design.width, width)
        nn.init.trunc_normal_(
            self.up.weight, std=design.init_std, a=-2 * design.init_std, b=2 * design.init_std
        )
        nn.init.zeros_(self.up.bias)
        self.norm = nn.LayerNorm(width)
        self.norm.load_state_dict(encoder.encoder.layer[-1].output.LayerNorm.state_dict())
        self.pooler = nn.Linear(width, width)
        if not design.new_pooler:
            self.pooler.load_state_dict(encoder.pooler.dense.state_dict())
        if design.start == "pruned":
            prune(self, encoder)
        self.classifier = nn.Linear(width, outputs)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits `(rows, outputs)` of states `(rows, layers + 2, tokens, d)`."""
        design = self.design
        if design.cell in ("mlp", "none") and design.output == "cls":
            states, mask = states[:, :, :1], mask[:, :1]
        attended = None if mask.all() else mask[:, None, None, :]
        state = torch.zeros(())
        for number, (layer, down) in enumerate(zip(self.read, self.down, strict=True)):
            reading = down(states[:, layer])
            if number == 0:
                state = reading
            elif design.mix == "gate":
                state = torch.lerp(reading, state, self.gates[number].sigmoid())
            else:
                state = state + reading
            state = self.cells[number](state, attended)
        mean = (state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        outputs = {"cls": state[:, 0], "mean": mean, "both": state[:, 0] + mean}
        state = outputs[design.output]
        hidden = self.norm(states[:, -1, 0] + self.up(state))
        pooled = torch.tanh(self.pooler(hidden))
        logits: torch.Tensor = self.classifier(F.dropout(pooled, 0.1, self.training))
        return logits


@torch.no_grad()
def prune(ladder: Ladder, encoder: Any) -> None:
    """Set what is read, and the cells, to the encoder's own weights, cut to the ladder's width.

    What has the largest weights stays: hidden dimensions, the same ones in all cells, heads of the
    attention, and rows within bottlenecks. Sung et al. (2022) choose by Fisher information.
    """
    layers, hidden = encoder.encoder.layer, encoder.config.hidden_size
    sizes = torch.zeros(hidden)
    for layer in layers:
        sizes += layer.attention.output.dense.weight.square().sum(1)
        sizes += layer.output.dense.weight.square().sum(1)
    dimensions = largest(sizes, ladder.design.width)
    entries = [encoder.embeddings.LayerNorm, *(layer.output.LayerNorm for layer in layers)]
    downs: Any = ladder.down
    for number, down, cell in zip(ladder.read, downs, ladder.cells, strict=True):
        down.weight.copy_(torch.eye(hidden)[dimensions])
        down.bias.zero_()
        prune_cell(cell, layers[number], entries[number], dimensions)


def prune_cell(cell: Any, layer: Any, entry: nn.LayerNorm, dimensions: torch.Tensor) -> None:
    """Cut an encoder's layer, which follows the norm `entry`, to some hidden dimensions."""
    attention = layer.attention
    parts = [attention.self.query, attention.self.key, attention.self.value]
    weights = torch.stack([part.weight for part in parts])
    biases = torch.stack([part.bias for part in parts])
    heads = (attention.self.num_attention_heads, -1)
    sizes = weights.unflatten(1, heads).square().sum((0, 2, 3))
    rows = torch.arange(weights.shape[1]).unflatten(0, heads)[largest(sizes, cell.heads)].flatten()
    project, output = cell.attention
    project.weight.copy_(weights[:, rows][:, :, dimensions].flatten(0, 1))
    project.bias.copy_(biases[:, rows].flatten())
    cut(output, attention.output.dense, dimensions, rows)
    cut_norm(cell.attention_norm, entry, dimensions)

    down, up = cell.bottleneck
    rows = largest(layer.intermediate.dense.weight.square().sum(1), down.out_features)
    cut(down, layer.intermediate.dense, rows, dimensions)
    cut(up, layer.output.dense, dimensions, rows)
    cut_norm(cell.norm, attention.output.LayerNorm, dimensions)


def cut(linear: nn.Linear, source: nn.Linear, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy some rows and columns of a linear layer."""
    linear.weight.copy_(source.weight[rows][:, columns])
    linear.bias.copy_(source.bias[rows])


def cut_norm(norm: nn.LayerNorm, source: nn.LayerNorm, dimensions: torch.Tensor) -> None:
    """Copy some dimensions of a norm."""
    norm.weight.copy_(source.weight[dimensions])
    norm.bias.copy_(source.bias[dimensions])


def largest(sizes: torch.Tensor, number: int) -> torch.Tensor:
    """Return the positions of the largest numbers, in order."""
    return sizes.topk(number).indices.sort().values


def train(design: Design, folder: Path, encoder: Any) -> dict[str, Any]:
    """Train one ladder; return its size, its scores in percent and its seconds."""
    torch.manual_seed(design.seed)
    generator = np.random.default_rng(design.seed)
    training, validation = (
        States(folder / design.task / split) for split in ("train", "validation")
    )
    outputs = len(TASKS[design.task].labels)
    model = Ladder(design, encoder, outputs)
    epochs = design.epochs or EPOCHS[design.task]
    steps = epochs * math.ceil(len(training.lengths) / BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), design.learning_rate, weight_decay=0)
    warmup = steps / 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / warmup, max(0.0, (steps - step) / (steps - warmup)))
    )
    start, scores = time.perf_counter(), []
    for _ in range(epochs):
        model.train()
        for rows in training.batches(generator):
            logits, labels = model(*training.batch(rows)), training.labels[rows]
            if outputs == 1:
                loss = F.mse_loss(logits[:, 0], labels.float())
            else:
                loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        scores.append(100 * score(model, validation, design.task))
    return {
        "trained": sum(weight.numel() for weight in model.parameters()),
        "best": round(max(scores), 2),
        "last": round(scores[-1], 2),
        "seconds": round(time.perf_counter() - start),
    }


@torch.no_grad()
def score(model: Ladder, states: States, task: str) -> float:
    """Return the task's main score."""
    model.eval()
    outputs = np.zeros((len(states.lengths), len(TASKS[task].labels)))
    for rows in states.batches():
        outputs[rows] = model(*states.batch(rows)).numpy()
    predicted = outputs.argmax(1) if outputs.shape[1] > 1 else outputs[:, 0]
    labels = states.labels.numpy().astype(float)
    return float(SCORES[TASK_SCORES[task][0]](labels, predicted.astype(float)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", required=True, help="Folder with GLUE's files.")
    parser.add_argument("--states", type=Path, required=True, help="Folder of the states.")
    parser.add_argument("--runs", type=Path, required=True, help="File with one run per line.")
    parser.add_argument("--output", type=Path, required=True, help="CSV file of the scores.")
    arguments = parser.parse_args()
    encoder = AutoModel.from_pretrained(find_packaged(ENCODER)).requires_grad_(False)
    while design := next_design(arguments.runs, arguments.output):
        if not (arguments.states / design.task / "validation" / "lengths.npy").exists():
            save_states(design.task, arguments.data_dir, arguments.states)
        row = {**asdict(design), **train(design, arguments.states, encoder)}
        is_new = not arguments.output.exists()
        with arguments.output.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if is_new:
                writer.writeheader()
            writer.writerow(row)
        print(row, flush=True)


def next_design(runs: Path, output: Path) -> Design | None:
    """Return the first run that the output lacks; None if it has all."""
    finished = set()
    if output.exists():
        with output.open(newline="") as file:
            for row in csv.DictReader(file):
                finished.add(
                    Design.from_line(" ".join(f"{f.name}={row[f.name]}" for f in fields(Design)))
                )
    for line in runs.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            design = Design.from_line(line)
            if design not in finished:
                return design
    return None


if __name__ == "__main__":
    main()
