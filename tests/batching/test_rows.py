"""In a mixed batch, each row gets its own adapter, however a model arranges the rows, or the batch
is refused.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch
import transformers
from peft import get_peft_model
from torch import nn

from architecture_cases import CASES, SIZES, build
from houlsby_peft import AdapterError, HoulsbyConfig
from tiny_models import perturb, tiny_bert


BASE = "__base__"
TEXT = {**SIZES, "vocab_size": 60, "num_key_value_heads": 2, "word_embed_proj_dim": 16}
IMAGE_TOKEN = 55


def with_adapters(model, **options):
    """The model with two adapters that are far from the identity."""
    options = {"r": 4, "init_weights": False, **options}
    model = get_peft_model(model, HoulsbyConfig(**options), adapter_name="one")
    perturb(model, seed=1)
    model.add_adapter("two", HoulsbyConfig(**options))
    model.set_adapter("two")
    perturb(model, seed=2)
    return model.eval()


def outputs(model, batch, names):
    """What the model computes, as one tensor with a row per example."""
    with torch.no_grad():
        result = model(**batch, adapter_names=list(names))
    if torch.is_tensor(result):
        return result
    keys = ("logits", "last_hidden_state", "text_embeds", "image_embeds")
    return torch.cat(
        [result[key].flatten(1) for key in keys if torch.is_tensor(result.get(key))], dim=1
    )


def one_row(batch, row):
    """A batch of one row: of every tensor with a row per example, that row."""
    rows = max(len(value) for value in batch.values())
    return {
        key: value[row : row + 1] if len(value) == rows else value for key, value in batch.items()
    }


def check(model, batch, names):
    """Check that each row of a mixed batch is what its adapter gives for that row alone."""
    mixed = outputs(model, batch, names).reshape(
        len(names), -1
    )  # as Gemma 4's vision model flattens its rows
    for row, name in enumerate(names):
        alone = outputs(model, one_row(batch, row), [name]).flatten()
        torch.testing.assert_close(mixed[row], alone, rtol=1e-4, atol=1e-4)


def ids(rows, length, seed=0):
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def pixels(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def config(name, **options):
    return getattr(transformers, f"{name}Config")(**options)


def xlnet():
    return build(
        transformers.XLNetModel,
        config("XLNet", vocab_size=60, d_model=16, n_layer=2, n_head=2, d_inner=24),
    )


def llava():
    parts = {"text_config": config("Llama", **TEXT), "vision_config": config("CLIPVision", **SIZES)}
    return build(
        transformers.LlavaForConditionalGeneration,
        config("Llava", **parts, image_token_id=IMAGE_TOKEN, vision_feature_layer=-1),
    )


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2}
    vision |= {"patch_size": 4, "spatial_merge_size": 2}
    parts = {"text_config": {**TEXT, "rope_parameters": rope}, "vision_config": vision}
    tokens = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": 57}
    return build(transformers.Qwen2VLForConditionalGeneration, config("Qwen2VL", **parts, **tokens))


def images_among_tokens(*images):
    """Tokens of which each row has so many images of four tokens, and the images of all rows."""
    tokens = ids(len(images), 12)
    for row, number in enumerate(images):
        tokens[row, 1 : 1 + 4 * number] = IMAGE_TOKEN
    return {"input_ids": tokens, "pixel_values": pixels(sum(images), 3, 8, 8)}


def patches_among_tokens(*images):
    """The same for Qwen2-VL, which packs the patches of all images."""
    tokens = ids(len(images), 12)
    for row, number in enumerate(images):
        for image in range(number):
            tokens[row, 5 * image] = 57
            tokens[row, 5 * image + 1 : 5 * image + 5] = IMAGE_TOKEN
    is_image = (tokens == IMAGE_TOKEN).long()
    return {
        "input_ids": tokens,
        "mm_token_type_ids": is_image,
        "pixel_values": pixels(16 * sum(images), 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * sum(images)),
    }


TEXT_AND_IMAGE = {"input_ids": ids(2, 6), "pixel_values": pixels(2, 3, 8, 8)}
AT_ENDS = {"target_modules": ["ff.layer_2"]}
REFUSED = {
    "sequence first": (xlnet, {"input_ids": ids(2, 2)}, AT_ENDS, "alone"),
    "all images in a row": (llava, images_among_tokens(2, 0), {}, "any row"),
    "packed images": (qwen2_vl, patches_among_tokens(2, 0), {}, "any row"),
    "two towers": (CASES["clip"].model, TEXT_AND_IMAGE, {}, "any row"),
}


@pytest.mark.parametrize(("make", "batch", "options", "word"), REFUSED.values(), ids=REFUSED)
def test_rows_that_are_unknown(make, batch, options, word):
    model = with_adapters(make(), **options)
    with pytest.raises(AdapterError, match=word):
        outputs(model, batch, ["one", "two"])
    # Rows of one adapter need not be known.
    model(**batch, adapter_names=["two", "two"])


def test_images_are_refused_after_a_batch_without_them_and_the_text_still_runs():
    model = with_adapters(llava())
    for _ in range(2):
        check(model, {"input_ids": ids(2, 12)}, ["one", "two"])
        with pytest.raises(AdapterError, match="any row"):
            outputs(model, images_among_tokens(1, 1), ["one", "two"])


def test_flattened_rows_after_a_batch_of_single_tokens():
    model = with_adapters(CASES["opt"].model())
    for length in (1, 4, 1):
        check(model, {"input_ids": ids(3, length)}, ["one", BASE, "two"])


class HomeMade(nn.Module):
    """A model of rows, parts and width 8 that arranges its hidden states in a given way for two of
    its layers.
    """

    def __init__(self, arrange, restore):
        super().__init__()
        self.lin0, self.lin1 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.arrange, self.restore = arrange, restore

    def forward(self, x):
        hidden = self.arrange(x)
        for layer in (self.lin0, self.lin1):
            hidden = hidden + layer(hidden)
        return self.restore(hidden, x.shape)


ARRANGEMENTS = {
    "as it is": (lambda x: x, lambda h, shape: h, True),
    "rows second": (lambda x: x.transpose(0, 1), lambda h, shape: h.transpose(0, 1), False),
    "flattened": (lambda x: x.flatten(0, 1), lambda h, shape: h.view(shape), True),
    "flattened, rows second": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda h, shape: h.view(shape[1], shape[0], -1).transpose(0, 1),
        False,
    ),
    "a part each": (lambda x: x.flatten(0, 1)[:, None], lambda h, shape: h[:, 0].view(shape), True),
    "all rows twice": (lambda x: torch.cat([x, x]), lambda h, shape: h[: shape[0]], False),
    "the rows in another order": (
        lambda x: x.flip(0).flatten(0, 1),
        lambda h, shape: h.view(shape).flip(0),
        False,
    ),
    "only what is not zero": (lambda x: x[x[..., 0] != 0], lambda h, shape: h, None),
}


@pytest.mark.parametrize(
    ("arrange", "restore", "is_right"), ARRANGEMENTS.values(), ids=ARRANGEMENTS
)
def test_arrangements(arrange, restore, is_right):
    torch.manual_seed(0)
    options = {"target_modules": ["lin0", "lin1"], "train_layer_norm": False}
    model = with_adapters(HomeMade(arrange, restore), **options)
    draw = random.Random(0)
    for rows, length in [(2, 2), (2, 4), (4, 2), (3, 6), (5, 3), (2, 1)]:
        x = torch.randn(rows, length, 8)
        names = ["one", *draw.choices(["one", "two", BASE], k=rows - 2), "two"]
        if is_right:
            check(model, {"x": x}, names)
        elif is_right is None:
            outputs(model, {"x": x}, names)
            x[0, : length // 2] = 0
            if length > 1:
                with pytest.raises(AdapterError, match="different numbers"):
                    outputs(model, {"x": x}, names)
        else:
            # Of a single part, both orders are the same, so that it may be right.
            with suppress(AdapterError):
                check(model, {"x": x}, names)
                assert length == 1


def test_further_batches_run_no_rows_alone(token_ids):
    model = with_adapters(tiny_bert())
    calls = []
    model.get_base_model().register_forward_pre_hook(lambda *_: calls.append(1))
    for length in (5, 5, 3, 1):
        outputs(model, {"input_ids": token_ids[:, :length]}, ["one", "two", BASE, "one", "two"])
    # Two runs of rows alone for texts of several tokens, and two for single tokens.
    assert len(calls) == 2 + 2 + 4
