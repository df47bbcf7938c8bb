"""Vision-language models of transformers; on some ranks and steps there is no image, so that the tower is not used."""

import dataclasses
import functools

import pytest
import torch
import transformers

import torchtitan_dmuon as dmuon

from .harness import Case, equals_one_process, modules

VOCAB, LENGTH, IMAGE = 64, 24, 63  # the last token stands for one feature of an image


def is_seen(step, rank):
    """Rank 2 sees no image in the first step; in the second only ranks 0 and 2 see one."""
    return (rank != 2, rank % 2 == 0, True)[step % 3]


def always(_step, _rank):
    return True


def generator(step, rank):
    return torch.Generator().manual_seed(100 * step + rank)


def conditional(config):
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config).train()


def tokens_of(step, rank, with_image):
    tokens = torch.randint(0, IMAGE - 3, (2, LENGTH), generator=generator(step, rank))
    if with_image:
        tokens[:, 2:6] = IMAGE
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def paligemma_loss(model, step, rank, has_image=always):
    inputs = tokens_of(step, rank, has_image(step, rank))
    inputs["token_type_ids"] = (inputs["input_ids"] != IMAGE).long()
    if has_image(step, rank):
        inputs["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator(step, rank))
    return model(**inputs).loss


def qwen_loss(model, step, rank, has_image=always):
    inputs = tokens_of(step, rank, has_image(step, rank))
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    if has_image(step, rank):
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
        inputs["pixel_values"] = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator(step, rank))
    return model(**inputs).loss


PALIGEMMA = transformers.PaliGemmaConfig(
    text_config={
        "model_type": "gemma",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "initializer_range": 0.1,
    },
    vision_config={
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 32,
    },
    projection_dim=32,
    initializer_range=0.1,
    image_token_id=IMAGE,
)
QWEN = transformers.Qwen2_5_VLConfig(
    text_config={
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    },
    vision_config={
        "hidden_size": 24,
        "intermediate_size": 32,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "window_size": 16,
        "initializer_range": 0.1,
        "fullatt_block_indexes": [1],
    },
    image_token_id=IMAGE,
    video_token_id=IMAGE - 1,
    vision_start_token_id=IMAGE - 2,
    vision_end_token_id=IMAGE - 3,
)

LANGUAGE = r"language_model\.layers\.\d+$"

CASES = {
    # The projector is in no unit, so the root is one, and its output holds the cache of keys and values.
    "paligemma": Case(
        build=lambda: conditional(PALIGEMMA),
        select=r"layers\.\d+\..*(proj|fc\d)\.weight$|multi_modal_projector\.linear\.weight$",
        units=lambda model: modules(model, r"vision_tower.*layers\.\d+$", LANGUAGE),
        sharded=lambda model: modules(model, LANGUAGE),
        loss_of=paligemma_loss,
    ),
    # Patch embedding (a Conv3d), fused q, k and v of the tower, merger.
    "qwen2.5_vl": Case(
        build=lambda: conditional(QWEN),
        select=r"(layers|blocks)\.\d+\..*(proj|qkv)\.weight$|patch_embed\.proj\.weight$|merger\.mlp\.\d\.weight$",
        units=lambda model: modules(model, r"patch_embed$", r"visual\.blocks\.\d+$", r"merger$", LANGUAGE),
        sharded=lambda model: modules(model, LANGUAGE),
        layouts={r"qkv\.weight$": dmuon.MatrixLayout(rows=(24, 24, 24))},
        loss_of=qwen_loss,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, figures):
    figures(equals_one_process(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_ranks_without_an_image_equal_one_process(name, figures):
    loss_of = functools.partial(CASES[name].loss_of, has_image=is_seen)
    figures(equals_one_process(dataclasses.replace(CASES[name], loss_of=loss_of, parts_unused=True)))
