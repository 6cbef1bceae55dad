"""Makes PEFT know the method "houlsby": the one place that touches PEFT's registry and classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import CONFIG_NAME, PeftType, TrainableTokensWrapper, register_peft_method


if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTuner


NAME = "houlsby"
PREFIX = "houlsby_"


def houlsby_peft_type() -> PeftType:
    """The member HOULSBY of PEFT's enum of methods, added to it on the first call.

    PEFT accepts only members of this closed enum, and parts of PEFT and transformers read a type's
    `.value`, so that a plain string in its place fails when an adapter is loaded. A member made
    this way pickles, copies, compares and serializes to JSON as PEFT's own members do.
    """
    name = NAME.upper()
    if name not in PeftType.__members__:
        member = str.__new__(PeftType, name)
        member._name_ = name
        member._value_ = name
        member._sort_order_ = len(PeftType)  # type: ignore[attr-defined]
        member.__objclass__ = PeftType  # type: ignore[attr-defined]
        PeftType._member_names_.append(name)
        PeftType._member_map_[name] = member
        PeftType._value2member_map_[name] = member
        # EnumType's own __setattr__ guards members; Python 3.12 and later look members up as class
        # attributes.
        type.__setattr__(PeftType, name, member)
    return PeftType(name)


def register(config_cls: type[PeftConfig], model_cls: type[BaseTuner]) -> None:
    """Register the method with PEFT, which refuses a second one of its name.

    Calling this again, also after a reload, replaces the classes by the given ones.
    """
    peft_type = houlsby_peft_type()
    registered = PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type)
    if registered is None or registered.__module__.partition(".")[0] != __name__.partition(".")[0]:
        register_peft_method(name=NAME, config_cls=config_cls, model_cls=model_cls, prefix=PREFIX)
    PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] = config_cls
    PEFT_TYPE_TO_TUNER_MAPPING[peft_type] = model_cls


def replace_template(write_card: Callable[[Path], None]) -> None:
    """Let PEFT and the Trainer write this method's cards with a function, in place of PEFT's
    template.

    `PeftModel.save_pretrained` asks for the card before it has saved the adapter;
    `HoulsbyConfig.save_pretrained`, which it calls last, writes it. The Trainer asks for the card
    of an adapter that is saved.
    """
    current = PeftModel.create_or_update_model_card
    original = getattr(current, "houlsby_original", current)

    @wraps(original)
    def create_or_update_model_card(self: PeftModel, output_dir: str) -> None:
        if self.peft_type != houlsby_peft_type():
            original(self, output_dir)
        elif Path(output_dir, CONFIG_NAME).is_file():
            write_card(Path(output_dir))

    vars(create_or_update_model_card)["houlsby_original"] = original
    setattr(PeftModel, "create_or_update_model_card", create_or_update_model_card)  # noqa: B010


def let_adapters_lack_tokens() -> None:
    """Let adapters without trained tokens be saved and loaded beside those with some, as PEFT's
    other wrappers do.
    """
    for name in ("adapter_state_dict", "adapter_state_dict_load_map"):
        original = getattr(TrainableTokensWrapper, name)

        @wraps(original)
        def of_adapter(self: Any, name: str, *args: Any, original: Any = original) -> Any:
            return (
                original(self, name, *args)
                if name in self.token_adapter.trainable_tokens_delta
                else {}
            )

        setattr(TrainableTokensWrapper, name, of_adapter)
