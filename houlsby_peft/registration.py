"""Makes PEFT know the method "houlsby": the one place that touches PEFT's registry and classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import CONFIG_NAME, PeftType, TrainableTokensWrapper, register_peft_method


if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTuner


# Its methods are replaced, which mypy would refuse.
_PEFT_MODEL: Any = PeftModel
NAME = "houlsby"
PREFIX = "houlsby_"
# Whether `PeftModel.load_adapter` is running in this thread.
LOADS_BY_PEFT: ContextVar[bool] = ContextVar("loads by PEFT", default=False)
# Whether `PeftModel.from_pretrained` is.
_CREATES_MODEL: ContextVar[bool] = ContextVar("creates a model", default=False)


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


def replace_template(write_card: Callable[[Path, Sequence[str]], None]) -> None:
    """Let PEFT and the Trainer write this method's cards with a function, not PEFT's template.

    `PeftModel.save_pretrained` asks for the card before it has saved the adapter;
    `HoulsbyConfig.save_pretrained`, which it calls last, writes it. The Trainer asks for the card
    of an adapter that is saved.
    """
    original = _PEFT_MODEL.create_or_update_model_card

    @wraps(original)
    def create_or_update_model_card(self: PeftModel, output_dir: str) -> None:
        if self.peft_type != houlsby_peft_type():
            original(self, output_dir)
            return
        tags = getattr(self.get_base_model(), "model_tags", None) or ()
        for config in self.peft_config.values():
            vars(config)["tags"] = tags
        if Path(output_dir, CONFIG_NAME).is_file():
            write_card(Path(output_dir), tags)

    _PEFT_MODEL.create_or_update_model_card = create_or_update_model_card


def undo_failed_loads() -> None:
    """Let `PeftModel` leave nothing of an adapter that it cannot load.

    PEFT adds an adapter before it reads the weights. Over an adapter of the same name it would load
    the weights of a file, but keep the options and labels: `HoulsbyModel.check_same` refuses that
    if these differ.
    """
    load_adapter_of_peft = _PEFT_MODEL.load_adapter
    from_pretrained_of_peft = _PEFT_MODEL.from_pretrained.__func__

    @wraps(from_pretrained_of_peft)
    def from_pretrained(cls: type[PeftModel], *args: Any, **kwargs: Any) -> PeftModel:
        token = _CREATES_MODEL.set(True)
        try:
            return from_pretrained_of_peft(cls, *args, **kwargs)  # type: ignore[no-any-return]
        finally:
            _CREATES_MODEL.reset(token)

    @wraps(load_adapter_of_peft)
    def load_adapter(
        self: PeftModel, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        if self.peft_type != houlsby_peft_type():
            return load_adapter_of_peft(self, model_id, adapter_name, *args, **kwargs)
        tuner: Any = self.base_model
        # Where the model is made from a file, its one adapter has the options that the user gave.
        is_new = _CREATES_MODEL.get() or adapter_name not in self.peft_config
        facts: dict[str, Any] = {}
        if not is_new:
            download_options, _ = self._split_kwargs(kwargs)
            config = PeftConfig.from_pretrained(model_id, **download_options)
            facts = tuner.check_same(adapter_name, config)
        token = LOADS_BY_PEFT.set(True)
        try:
            with tuner.adding(adapter_name) if is_new else nullcontext():
                result = load_adapter_of_peft(self, model_id, adapter_name, *args, **kwargs)
            if facts:
                tuner.note(adapter_name, **facts)
            if not self.peft_config[adapter_name].inference_mode:
                tuner.train_adapter(adapter_name)
            return result
        finally:
            LOADS_BY_PEFT.reset(token)

    _PEFT_MODEL.load_adapter = load_adapter
    _PEFT_MODEL.from_pretrained = classmethod(from_pretrained)


def let_adapters_lack_tokens() -> None:
    """Let adapters without trained tokens be saved and loaded beside those with some.

    PEFT's other wrappers allow that.
    """
    for name in ("adapter_state_dict", "adapter_state_dict_load_map"):
        original = getattr(TrainableTokensWrapper, name)

        @wraps(original)
        def of_adapter(self: Any, name: str, *args: Any, original: Any = original) -> Any:
            if name not in self.token_adapter.trainable_tokens_delta:
                return {}
            return original(self, name, *args)

        setattr(TrainableTokensWrapper, name, of_adapter)
