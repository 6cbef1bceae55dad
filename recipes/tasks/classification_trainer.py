"""How a classifier trains: weighted classes, a contrastive loss, standardized targets, and
thresholds at the end.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.metrics import precision_recall_curve
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize

from data.labels import SHOWN
from run.edge import log
from run.model import base_model, note
from run.trainer import RecipeTrainer
from tasks.frozen_encoder import mean_states


_FEWEST = 5  # examples with and without a class, from which its threshold is chosen


class ClassificationTrainer(RecipeTrainer):
    """A trainer whose loss may weight classes, compare the texts of a batch, or standardize the
    targets of a regression.

    With `contrastive_weight`, the training loss has a second part, which the evaluations lack: see
    `contrastive_loss`.

    With `scale`, the targets' mean and standard deviation, the model learns standardized targets,
    whatever their unit. Its head gives values in the unit, also when it is saved.
    """

    model: Any
    eval_dataset: Any

    def __init__(
        self,
        weights: Sequence[float] | None = None,
        scale: tuple[float, float] | None = None,
        is_multi: bool = False,
        contrastive_weight: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._is_multi = is_multi
        self.weights: torch.Tensor | None = None
        if weights is not None:
            self.weights = torch.tensor(weights, device=self.args.device)
        self._contrastive_weight = contrastive_weight
        if contrastive_weight:
            base_model(self.model).base_model.register_forward_hook(self._keep_states)
        self.scale = scale
        if scale is not None:
            mean, deviation = scale
            self._output = last_linear(self.model)
            self._hook = self._output.register_forward_hook(
                lambda _, args, output: output.float() * deviation + mean
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss of standardized targets or weighted classes, or the model's own; in
        training, with the contrastive loss.
        """
        if self.weights is None:
            loss_and_outputs: Any = super().compute_loss(model, inputs, return_outputs=True)
            loss, outputs = loss_and_outputs
            if self.scale is not None:
                _, deviation = self.scale
                loss = loss / deviation**2
        else:
            labels = inputs["labels"]
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            smoothing = self.args.label_smoothing_factor
            loss = weighted_loss(outputs.logits.float(), labels, self.weights, smoothing)
        if self._contrastive_weight and model.training:
            means = mean_states(self._states.float(), inputs["attention_mask"])
            loss = loss + self._contrastive_weight * contrastive_loss(means, inputs["labels"])
        if return_outputs:
            return loss, outputs
        return loss

    def _keep_states(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Keep the encoder's last states of a batch, `(rows, tokens, width)`."""
        self._states: torch.Tensor = outputs[0]

    def save_trained(self) -> None:
        """Save the weights of the kept epoch and, for several classes per text, thresholds."""
        if self.scale is not None:
            self._move_scale_into_head()
        if self._is_multi and self.eval_dataset is not None:
            self._record_thresholds()
        super().save_trained()

    def _move_scale_into_head(self) -> None:
        """Let the weights themselves give values in the unit, without the hook."""
        assert self.scale is not None
        mean, deviation = self.scale
        self.scale = None
        self._hook.remove()
        with torch.no_grad():
            self._output.weight.mul_(deviation)
            self._output.bias.mul_(deviation).add_(mean)

    def _record_thresholds(self) -> None:
        """Choose the thresholds of the classes on validation, and record them in an adapter."""
        if self.record is None:
            return
        output = self.predict(self.eval_dataset, metric_key_prefix="kept")
        thresholds = choose_thresholds(expit(output.predictions), np.asarray(output.label_ids))
        note(self.model, thresholds=thresholds)
        listed = []
        names = self.model.config.id2label.values()
        for name, threshold in zip(names, thresholds, strict=True):
            listed.append(f"{name} {threshold:g}")
        more = ", ..." * (len(listed) > SHOWN)
        log(f"thresholds of the classes: {', '.join(listed[:SHOWN])}{more}")


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the layer that gives a classifier's output: the last linear one that is trained."""
    trained = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            trained.append(module)
    return trained[-1]


def weighted_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the mean of the weighted losses of the rows, for `logits` of (rows, classes).

    The labels are class numbers, (rows), or a 0.0 or 1.0 for each class, (rows, classes); the
    weight of a class is then that of its presence. The mean is over the rows, not over their
    weights, so that a batch of one row has its weight as well.
    """
    if labels.is_floating_point():
        return binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
    total = cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=smoothing)
    return total / len(labels)


def contrastive_loss(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return how far the cosines of the states of two texts are from 1, if both have the same
    class, and else from 0: the mean squared difference over all pairs of a batch.

    It is the loss of SetFit (Tunstall et al. 2022, arXiv 2209.11055), of all pairs in place of
    drawn ones. Equal pairs count as much as unequal ones, however many they are.

    Args:
        states: `(rows, width)`.
        labels: The class numbers, `(rows,)`.
    """
    directions = normalize(states, dim=-1)
    is_same = labels[:, None] == labels
    differences = (directions @ directions.T - is_same.float()) ** 2
    is_of_two = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    # Sums of a fixed shape, as a CUDA graph needs them.
    means = []
    for is_kind in (is_same & is_of_two, ~is_same):
        means.append((differences * is_kind).sum() / is_kind.sum().clamp(min=1))
    return torch.stack(means).mean()


def choose_thresholds(
    probabilities: NDArray[np.float64], labels: NDArray[np.float64]
) -> list[float]:
    """Return for each class the threshold with the best F1, or 0.5 if it has few examples.

    The arrays are (examples, classes).
    """
    chosen = []
    for scores, is_class in zip(probabilities.T, labels.T, strict=True):
        if not _FEWEST <= is_class.sum() <= len(is_class) - _FEWEST:
            chosen.append(0.5)
            continue
        precision, recall, thresholds = precision_recall_curve(is_class, scores)
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        best = int(f1[:-1].argmax())
        # In the middle of the gap below the least score that is still given.
        below = thresholds[best - 1] if best else 0.0
        chosen.append(round(float(thresholds[best] + below) / 2, 4))
    return chosen
