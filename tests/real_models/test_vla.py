"""Vision-language-action policies of lerobot, trained by their own `forward` and asked for actions.

Their outer loop calls the projections of both towers itself and passes the decoder layers' `forward` by, so the units
are the modules that it does call: a list of modules forms one unit.
"""

import types

import pytest
import torch
import transformers

from .harness import Case, equals_one_process, modules
from .packages import missing

if reason := missing("lerobot"):
    pytest.skip(f"pi0, SmolVLA: {reason}", allow_module_level=True)

from lerobot.configs import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.pi0 import modeling_pi0  # noqa: E402
from lerobot.policies.pi0.configuration_pi0 import PI0Config  # noqa: E402
from lerobot.policies.smolvla import modeling_smolvla, smolvlm_with_expert  # noqa: E402
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig  # noqa: E402

VOCAB, WORDS, CHUNK, STATE, ACTION, IMAGE = 64, 6, 5, 4, 3, 16
FEATURES = {
    "device": "cpu",
    "chunk_size": CHUNK,
    "n_action_steps": CHUNK,
    "max_state_dim": STATE,
    "max_action_dim": ACTION,
    "input_features": {
        "observation.images.top": PolicyFeature(FeatureType.VISUAL, (3, IMAGE, IMAGE)),
        "observation.state": PolicyFeature(FeatureType.STATE, (STATE,)),
    },
    "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
}


def pi0():
    """The sizes that its module fixes are those of the published weights; here they are small."""

    def small(variant):
        width, hidden = (32, 48) if variant == "gemma_2b" else (24, 40)
        return modeling_pi0.GemmaConfig(width, depth=2, mlp_dim=hidden, num_heads=8, num_kv_heads=1, head_dim=8)

    def paligemma(config):
        config.text_config.vocab_size = VOCAB
        vision = config.vision_config
        vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers = 16, 24, 2
        vision.num_attention_heads, vision.patch_size, vision.projection_dim = 2, 8, 32
        return make_paligemma(config)

    def gemma(config):
        config.vocab_size = VOCAB
        return make_gemma(config)

    make_paligemma = modeling_pi0.PaliGemmaForConditionalGenerationWithPiGemma
    make_gemma = modeling_pi0.PiGemmaForCausalLM
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_pi0, "get_gemma_config", small)
        patch.setattr(modeling_pi0, "PaliGemmaForConditionalGenerationWithPiGemma", paligemma)
        patch.setattr(modeling_pi0, "PiGemmaForCausalLM", gemma)
        policy = modeling_pi0.PI0Policy(PI0Config(**FEATURES, image_resolution=(IMAGE, IMAGE), num_inference_steps=2))
    policy.train()
    return policy


def smolvla():
    """Its configuration and processor come from a hub: here they are made."""
    config = transformers.SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IMAGE,
            "patch_size": 4,
        },
        scale_factor=2,
        image_token_id=VOCAB - 1,
        pad_token_id=0,
    )
    tokenizer = types.SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        made = {"AutoConfig": config, "AutoProcessor": types.SimpleNamespace(tokenizer=tokenizer)}
        for name, value in made.items():
            stub = types.SimpleNamespace(from_pretrained=lambda _name, value=value: value)
            patch.setattr(smolvlm_with_expert, name, stub)
        policy = modeling_smolvla.SmolVLAPolicy(
            SmolVLAConfig(
                **FEATURES,
                resize_imgs_with_padding=(IMAGE, IMAGE),
                num_vlm_layers=2,
                num_steps=2,
                train_expert_only=False,
                freeze_vision_encoder=False,
            )
        )
    policy.train()
    return policy


def batch(step, rank):
    g = torch.Generator().manual_seed(100 * step + rank)
    size = 4
    return {
        "observation.images.top": torch.rand(size, 3, IMAGE, IMAGE, generator=g),
        "observation.state": torch.randn(size, STATE, generator=g),
        "observation.language.tokens": torch.randint(0, VOCAB, (size, WORDS), generator=g),
        "observation.language.attention_mask": torch.ones(size, WORDS, dtype=torch.bool),
        "action": torch.randn(size, CHUNK, ACTION, generator=g),
    }


def loss_of(policy, step, rank):
    torch.manual_seed(1000 + 100 * step + rank)  # noise and times of the flow
    return policy(batch(step, rank))[0]


def act(policy):
    torch.manual_seed(7)
    return policy.predict_action_chunk(batch(9, 0))


def units(policy):
    """Of both towers together, one unit of what a layer calls before its attention, one of what it calls after."""
    layers = modules(policy, r"(text|language)_model\.layers\.\d+$"), modules(policy, r"expert\.(model\.)?layers\.\d+$")
    found = modules(policy, r"patch_embedding$", r"vision_(tower|model)\..*layers\.\d+$", r"(connector|projector)$")
    for pair in zip(*layers, strict=True):
        found.append([p for x in pair for p in (x.self_attn.q_proj, x.self_attn.k_proj, x.self_attn.v_proj)])
        found.append([p for x in pair for p in (x.self_attn.o_proj, x.mlp)])
    return found


def single_units(policy):
    return [m for unit in units(policy) for m in (unit if isinstance(unit, list) else [unit])]


def case(build, units=units):
    return Case(
        build=build,
        select=r"layers\.\d+\..*(proj|fc\d)\.weight$|patch_embedding\.weight$|(modality_projection|projector)\..*weight$",
        units=units,
        sharded=lambda _policy: [],
        loss_of=loss_of,
        after=act,
        methods=["predict_action_chunk"],
    )


CASES = {
    "pi0": case(pi0),
    "pi0_single_units": case(pi0, single_units),
    "smolvla": case(smolvla),
    "smolvla_single_units": case(smolvla, single_units),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, figures):
    figures(equals_one_process(CASES[name]))
