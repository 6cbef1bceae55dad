"""The table of architectures: where the output of each sub-layer meets the skip connection.

Houlsby et al. 2019 (figure 2, left) insert the adapter after the projection of a sub-layer and its dropout, before the
skip connection and the norm. `SubLayer.output` names the last module before the skip: a dropout where the model has
one as a module, else the projection. All names are relative to one layer of a `Stack`.

To add an architecture, read its layer's `forward`, write a row here and one in `tests/test_architectures.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SubLayer:
    """The output of one sub-layer.

    Args:
        output: the module whose output meets the skip connection; the adapter is applied to this output.
        projection: the module with weights that determines width, device and dtype where `output` has none (a
            dropout). None: `output` itself.
    """

    output: str
    projection: str | None = None


@dataclass(frozen=True)
class Stack:
    """A list of equal layers.

    Args:
        layers: path of the list of layers, as it ends: `encoder.layer` matches `bert.encoder.layer.0`.
        attention, feed_forward, cross_attention: the sub-layers; None where a layer has no such sub-layer.
    """

    layers: str
    attention: SubLayer | None
    feed_forward: SubLayer | None
    cross_attention: SubLayer | None = None


_BERT = (
    Stack(
        "encoder.layer",
        attention=SubLayer("attention.output.dropout", projection="attention.output.dense"),
        feed_forward=SubLayer("output.dropout", projection="output.dense"),
    ),
)

# Keys are the `model_type` of transformers' configurations.
ARCHITECTURES: dict[str, tuple[Stack, ...]] = {
    "bert": _BERT,
    "distilbert": (
        Stack(
            "transformer.layer",
            attention=SubLayer("attention.out_lin"),
            feed_forward=SubLayer("ffn.dropout", projection="ffn.lin2"),
        ),
    ),
    "electra": _BERT,
    "roberta": _BERT,
}
