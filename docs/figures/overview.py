"""Draw docs/figures/overview.png: one frozen model, small adapters per task, rows of several tasks
in one batch.
"""

from pathlib import Path

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch


GREY, DARK = "#e4e7eb", "#3b4252"
TASKS = {"mood": "#2f7ed8", "topic": "#e07b39", "urgency": "#3a9a5b"}
TEXTS = {"mood": "It works, thanks!", "topic": "I paid twice.", "urgency": "Our shop is down!"}
ANSWERS = {"mood": "mood: satisfied", "topic": "topic: billing", "urgency": "urgency: high"}


def box(axes, x, y, width, height, color, text="", text_color="white", size=9):
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.08",
            color=color,
            linewidth=0,
        )
    )
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        color=text_color,
        fontsize=size,
    )


def arrow(axes, start, end, color=DARK):
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=color, linewidth=1.1)
    )


def main():
    figure, axes = plt.subplots(figsize=(9, 3.1), dpi=160)
    axes.set(xlim=(0, 18), ylim=(0, 7))
    axes.axis("off")
    for row, (task, color) in enumerate(TASKS.items()):
        y = 4.6 - 1.5 * row
        box(axes, 0.1, y, 3.1, 0.9, color, TEXTS[task])
        arrow(axes, (3.3, y + 0.45), (4.3, y + 0.45), color)
        arrow(axes, (13.7, y + 0.45), (14.7, y + 0.45), color)
        box(axes, 14.8, y, 3.1, 0.9, color, ANSWERS[task])
    axes.text(1.65, 6.1, "one batch, three tasks", ha="center", fontsize=9, color=DARK)
    axes.text(16.35, 6.1, "each with its own labels", ha="center", fontsize=9, color=DARK)

    axes.add_patch(
        FancyBboxPatch(
            (4.4, 0.9),
            9.2,
            5.1,
            boxstyle="round,pad=0,rounding_size=0.15",
            facecolor="white",
            edgecolor=DARK,
        )
    )
    axes.text(9, 6.2, "one frozen model (BERT-base: 438 MB)", ha="center", fontsize=9, color=DARK)
    x = 4.7
    for name in ("attention", "feed-forward"):
        box(axes, x, 1.3, 1.75, 4.3, GREY, name, DARK, 7)
        for row, color in enumerate(TASKS.values()):
            box(axes, x + 1.95, 4.8 - 1.5 * row, 0.75, 0.5, color)
        arrow(axes, (x + 2.75, 3.45), (x + 3.15, 3.45))
        x += 3.2
    box(axes, x, 1.3, 1.35, 4.3, GREY, "further\nlayers", DARK, 8)
    for row, color in enumerate(TASKS.values()):
        box(axes, x + 1.55, 4.8 - 1.5 * row, 0.65, 0.5, color)
    axes.text(x + 1.87, 1.35, "heads", ha="center", fontsize=6.5, color=DARK)
    axes.text(7.02, 1.35, "adapters", ha="center", fontsize=6.5, color=DARK)
    axes.text(10.22, 1.35, "adapters", ha="center", fontsize=6.5, color=DARK)
    axes.text(
        9, 0.25,
        "a task is one file of 1.7 to 9.7 MB; without it, the model is what it was, bit for bit",
        ha="center", fontsize=9, color=DARK,
    )  # fmt: skip
    figure.savefig(Path(__file__).with_suffix(".png"), bbox_inches="tight")


if __name__ == "__main__":
    main()
