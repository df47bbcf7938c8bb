"""Language models of transformers: plain, tied, with experts, with Conv1D weights; checkpointing and adapters."""

import pytest
import torch
import transformers

import torchtitan_dmuon as dmuon

from .harness import Case, equals_one_process
from .packages import needs

VOCAB, LENGTH, BATCH = 64, 24, 2
PROJECTIONS = r"layers\.\d+\..*proj\.weight$"
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,  # attention is then far from uniform
}


def causal_lm(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def tokens_of(step, rank):
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, step, rank):
    tokens = tokens_of(step, rank)
    return model(input_ids=tokens, labels=tokens).loss  # use_cache as it is by default


def generate(model):
    """Greedy tokens; a fixed number, since all ranks must call the units alike."""
    model.eval()
    return model.generate(tokens_of(9, 0)[:, :6], max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)


def case(config, **options):
    plain = {"build": lambda: causal_lm(config), "select": PROJECTIONS, "units": layers, "loss_of": loss_of}
    return Case(**plain | options)


def layers(model):
    return list(model.base_model.layers)


def llama(**options):
    return transformers.LlamaConfig(**SMALL, **options)


def checkpointed(reentrant):
    model = causal_lm(llama())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def adapted():
    """Low-rank adapters by PEFT: all but they and the norms are frozen."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    torch.manual_seed(1)
    model = peft.get_peft_model(causal_lm(llama()), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)  # its zeros leave lora_A without a gradient in the first step
        p.requires_grad_("lora" in name or "norm" in name)
    return model


QWEN3_MOE = transformers.Qwen3MoeConfig(
    **SMALL,
    head_dim=8,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    experts_implementation="eager",
)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = r"mlp\.experts\.(gate_up|down)_proj$"

CASES = {
    "llama": case(llama()),
    "llama_tied": case(llama(tie_word_embeddings=True)),
    # A unit of the root, whose output holds the cache of keys and values.
    "llama_with_head": case(llama(), select=rf"{PROJECTIONS}|^lm_head\.weight$"),
    "llama_generates": case(llama(), after=generate),
    "llama_checkpointing": case(llama(), build=lambda: checkpointed(False)),
    "llama_reentrant_checkpointing": case(llama(), build=lambda: checkpointed(True)),
    "llama_adapters": case(
        llama(),
        build=adapted,
        select=r"lora_[AB]\.default\.weight$",
        units=lambda model: layers(model.get_base_model()),
    ),
    # Fused query, key and value, and gate and up.
    "phi3": case(
        transformers.Phi3Config(**SMALL, pad_token_id=0),
        layouts={
            r"qkv_proj\.weight$": dmuon.MatrixLayout(rows=(32, 16, 16)),
            r"gate_up_proj\.weight$": dmuon.MatrixLayout(rows=(48, 48)),
        },
    ),
    # Conv1D stores [in, out], and query, key and value in one: its matrices are the transposes of blocks of columns.
    "gpt2": case(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.1, **NO_DROPOUT
        ),
        select=r"\.h\.\d+\..*c_(attn|proj|fc)\.weight$",
        units=lambda model: list(model.transformer.h),
        layouts={r"c_attn\.weight$": dmuon.MatrixLayout(rows=(32, 32, 32), transposed=True)},
    ),
    # Experts in one parameter [E, gate and up, hidden]: each is a piece of two matrices.
    "qwen3_moe": case(
        QWEN3_MOE,
        select=rf"{PROJECTIONS}|{EXPERTS}",
        stacks=EXPERTS,
        layouts={r"gate_up_proj$": dmuon.MatrixLayout(rows=(16, 16))},
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs("peft")) if "adapters" in n else n for n in CASES])
def test_equals_one_process(name, figures):
    figures(equals_one_process(CASES[name]))
