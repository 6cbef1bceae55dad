"""The arguments of the method and of the adapter. None is changed after it was read."""

from dataclasses import dataclass
from typing import Any, Literal

from common.edge import RecipeError
from common.flags import check_path, flag
from common.training_arguments import RecipeTrainingArguments
from houlsby_peft import HoulsbyConfig


POOLER = "pooler"  # BERT's layer between the encoder and the head of a classifier
AUTO = "auto"
BaseDtype = Literal["auto", "float32", "bfloat16"]
# What the packaged encoder needs to learn well, by method: its pooler was never pretrained.
MINILM_SETTINGS: dict[str, dict[str, Any]] = {
    "houlsby": {"train_pooler": True, "learning_rate": 1e-3},
    "lora": {"train_pooler": True},
    "ia3": {"train_pooler": True},
    "layer_norm": {"train_pooler": True},
    "linear": {"train_pooler": True},
}
_NORMS: dict[str, bool | Literal["all"]] = {"true": True, "false": False, "all": "all"}


@dataclass(frozen=True)
class AdapterArguments:
    """The adapter; HoulsbyConfig documents each field."""

    _argument_group_name = "adapter"

    r: int = flag(default=64, help="Width of the bottleneck.")
    share_layers: int = flag(
        default=0,
        help="0: a separate bottleneck at each position; 1: one per layer; k: one per k "
        "consecutive layers.",
    )
    train_layer_norm: Literal["true", "false", "all"] = flag(
        default="true",
        help="Train the layer norms of the adapted layers, none, or all of the model's.",
    )
    activation: str = flag(default="gelu", help="Any activation that transformers knows by name.")
    layers: list[int] | None = flag(  # noqa: RUF009
        default=None, help="Layers to adapt, counted from 0; default: all."
    )
    kind: Literal["houlsby", "pfeiffer", "parallel", "ladder"] = flag(
        default="houlsby",
        help="What the bottleneck reads: the sub-layer's output, the normalized sum, or its input; "
        "ladder: a network of width r beside the encoder, which reads its hidden states.",
    )
    positions: list[str] | None = flag(  # noqa: RUF009
        default=None,
        help="Sub-layers to adapt: attention, feed_forward; default: those of the kind.",
    )
    dropout: float = flag(default=0.0, help="Dropout inside the bottleneck.")
    init_std: float = flag(default=0.01, help="Standard deviation of the initial projections.")
    init_adapter: str | None = flag(
        default=None, help="Start from the bottlenecks and norms of this adapter; the head is new."
    )

    def __post_init__(self) -> None:
        check_path("init_adapter", self.init_adapter)
        self.config()  # checks the options before anything is loaded

    def config(self, **fields: Any) -> HoulsbyConfig:
        """Return the PEFT configuration. Further fields, such as task_type, are passed on."""
        return HoulsbyConfig(
            r=self.r,
            share_layers=self.share_layers,
            train_layer_norm=_NORMS[self.train_layer_norm],
            layers_to_transform=self.layers,
            activation=self.activation,
            kind=self.kind,
            positions=self.positions,  # type: ignore[arg-type]  # None: those of the kind
            dropout=self.dropout,
            init_std=self.init_std,
            **fields,
        )


@dataclass(frozen=True)
class ClassifierArguments(AdapterArguments):
    """The adapter of a text classifier, which may also train the pooler, and have a larger head."""

    train_pooler: bool = flag(
        default=False,
        help="Also train BERT's pooler, as full fine-tuning does. With an encoder whose pooler "
        "was never pretrained, such as minilm, adapters then learn sooner and with every "
        "seed; minilm: true.",
    )

    head: Literal["linear", "two_layer"] = flag(
        default="linear",
        help="One linear layer on the pooled [CLS] vector or, for adapters, a hidden layer with "
        "tanh before it.",
    )

    def config(self, **fields: Any) -> HoulsbyConfig:
        """Return the PEFT configuration, with the pooler among the modules to train and save if
        asked for.
        """
        modules = [POOLER] if self.train_pooler else None
        return super().config(
            modules_to_save=modules, two_layer_head=self.head == "two_layer", **fields
        )


@dataclass(frozen=True)
class MethodArguments:
    """The method, and the options of those that are not adapters."""

    _argument_group_name = "method"

    method: Literal["houlsby", "full", "top_k", "layer_norm", "lora", "ia3", "linear"] = flag(
        default="houlsby",
        help="Train adapters, all weights, the top layers, the layer norms, PEFT's LoRA or IA3, "
        "or only the head. Every method trains the head.",
    )
    base_dtype: BaseDtype = flag(  # noqa: RUF009
        default=AUTO,
        help="Data type of the frozen weights; adapters and LoRA are trained in float32. 'auto' "
        "is bfloat16 if this device multiplies matrices of the model's shape faster in "
        "it, else float32. Other methods, --fp16, DeepSpeed and FSDP need float32.",
    )
    top_k: int | None = flag(
        default=None,
        help="Number of layers that --method top_k trains, from the top; the embeddings stay "
        "frozen.",
    )
    lora_r: int = flag(default=8, help="Rank of LoRA's matrices.")
    lora_alpha: int = flag(default=16, help="LoRA's scale, which is divided by the rank.")
    lora_targets: list[str] | None = flag(  # noqa: RUF009
        default=None,
        help="Linear layers that LoRA adapts, by the end of their name; default: PEFT's choice.",
    )

    @property
    def adds_weights(self) -> bool:
        """Whether the method freezes the encoder and adds weights, rather than training the
        encoder's own.
        """
        return self.method in ("houlsby", "lora", "ia3")

    def check(self, adapter: AdapterArguments, training: RecipeTrainingArguments) -> None:
        """Raise RecipeError if an option would silently have no effect with this method, or its
        result is unusable.
        """
        for_adapters = {
            "--push_to_hub": training.push_to_hub,
            "--init_adapter": adapter.init_adapter,
            "--up_lr_ratio": training.up_lr_ratio != 1,
            "--head two_layer": adapter.config().two_layer_head,
        }
        for option, value in for_adapters.items():
            if value and self.method != "houlsby":
                raise RecipeError(f"{option} needs --method houlsby, got {self.method}.")
        if self.base_dtype == "bfloat16" and not self.adds_weights:
            raise RecipeError(
                "--base_dtype bfloat16 is for methods that add weights to a frozen encoder, got "
                f"{self.method}. Leave it out; for speed, give --bf16."
            )
        if (self.method == "top_k") != (self.top_k is not None):
            raise RecipeError(
                f"--method top_k and --top_k need each other, got {self.method} and {self.top_k}."
            )
