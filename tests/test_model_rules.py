"""What of a model is owned, and how it falls apart, by golden names: models whose own kernels are not installed too."""

import re
import sys
import types
from collections import Counter

import pytest
import torch

from tests.ranks import run_ranks
from torchtitan_dmuon.matrices import MatrixLayout
from torchtitan_dmuon.titan import platform
from torchtitan_dmuon.titan.config import ConfigError, assign_parameters

platform.prepare()

import torchtitan.models.deepseek_v3  # noqa: E402, F401  (imported once, before forking)

from torchtitan_dmuon.titan.models import owned_specs  # noqa: E402
from torchtitan_dmuon.titan.planning import DEFAULT_PATTERN  # noqa: E402

HEAD = MatrixLayout(groups=4, rows=(64, 64))  # of four heads: the query's rows, then its gate's
LINEAR_ATTENTION = {
    "attn.in_proj_q.weight": (128, 256),
    "attn.in_proj_k.weight": (128, 256),
    "attn.in_proj_v.weight": (256, 256),
    "attn.in_proj_z.weight": (256, 256),
    "attn.out_proj.weight": (256, 256),
}
ATTENTION = {
    "attn.wq.weight": (512, 256),
    "attn.wk.weight": (128, 256),
    "attn.wv.weight": (128, 256),
    "attn.wo.weight": (256, 256),
}
DENSE = {
    "feed_forward.w1.weight": (512, 256),
    "feed_forward.w3.weight": (512, 256),
    "feed_forward.w2.weight": (256, 512),
}
EXPERTS = {
    **{f"moe.routed_experts.inner_experts.{w}": (8, 256, 256) for w in ("w1_EFD", "w2_EDF", "w3_EFD")},
    **{f"moe.shared_experts.{w}.weight": (256, 256) for w in ("w1", "w2", "w3")},
}
# Model -> how many layers have which weights.
GOLDEN = {
    ("qwen3_5", "debugmodel"): [(6, LINEAR_ATTENTION), (2, ATTENTION), (8, DENSE)],
    ("qwen3_5", "debugmodel_moe"): [(3, LINEAR_ATTENTION), (1, ATTENTION), (4, EXPERTS)],
    ("muse_glimmer", "debugmodel"): [
        (8, {"attention.qkv_linear.wq.weight": (256, 256), "attention.qkv_linear.wk.weight": (128, 256)}),
        (8, {"attention.qkv_linear.wv.weight": (128, 256), "attention.wo.weight": (256, 256)}),
        (8, {"attention.o_gate.weight": (256, 256), "feed_forward.w1.weight": (768, 256)}),
        (8, {"feed_forward.w3.weight": (768, 256), "feed_forward.w2.weight": (256, 768)}),
    ],
}


def _without_kernels():
    """The triton kernels that qwen3_5 imports, as names alone."""

    def function():
        return type("Kernel", (torch.autograd.Function,), {})

    for name, held in {
        "fla": {}, "fla.modules": {}, "fla.modules.conv": {}, "fla.modules.conv.triton": {},
        "fla.modules.conv.triton.ops": {"CausalConv1dFunction": function()}, "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": None, "fused_recurrent_gated_delta_rule": None},
        "fla.ops.gated_delta_rule.chunk": {"ChunkGatedDeltaRuleFunction": function()},
        "fla.ops.gated_delta_rule.fused_recurrent": {"FusedRecurrentFunction": function()},
    }.items():  # fmt: skip
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__dict__.update(held)


def _owned(rank, world, family, flavor):
    import importlib

    _without_kernels()
    options = {"moe_comm_backend": "standard"} if "moe" in flavor else {}
    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor, **options)
    with torch.device("meta"):
        model = spec.model.build()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if ".attn.conv_" not in n}  # several maps each
    groups = assign_parameters(shapes, [(DEFAULT_PATTERN, "DMuon"), (".*", "AdamW")]).groups
    plain = owned_specs(model, groups[0])
    heads = [n for n in groups[0] if re.search(r"\.w[qkv]\.weight", n)]
    return plain, owned_specs(model, heads, heads), groups[1]


@pytest.mark.parametrize("family, flavor", list(GOLDEN))
def test_owned_weights_are_the_known_ones(family, flavor):
    ((specs, by_head, rest),) = run_ranks(_owned, 1, family, flavor, init=False)
    found = Counter((re.sub(r"^layers\.\d+\.", "", s.name), s.shape) for s in specs)
    expected = Counter()
    for count, weights in GOLDEN[family, flavor]:
        expected.update({item: count for item in weights.items()})
    assert found == expected
    cut = {re.sub(r"^layers\.\d+\.", "", s.name): s.layout for s in specs if s.layout != MatrixLayout()}
    assert cut == ({"attn.wq.weight": HEAD} if family == "qwen3_5" else {})
    heads = {re.sub(r"^layers\.\d+\.", "", s.name): s.layout for s in by_head}
    if family == "qwen3_5":
        assert heads == {f"attn.{w}.weight": MatrixLayout(rows=(64,) * n) for w, n in (("wq", 8), ("wk", 2), ("wv", 2))}
    # Rows of scores stay with AdamW: of experts, of a shared expert, of heads.
    scores = {re.sub(r"\d+", "N", n) for n in rest if re.search(r"gate\.weight$|in_proj_[ab]", n)}
    if flavor == "debugmodel_moe":
        assert scores >= {"layers.N.moe.router.gate.weight", "layers.N.moe.shared_experts.gate.weight"}
    if family == "qwen3_5":
        assert scores >= {f"layers.N.attn.in_proj_{x}.weight" for x in "ab"}


def test_a_gated_query_falls_apart_by_head():
    """Against TorchTitan's own reading of it: view(heads, 2 x head_dim), then two halves."""
    weight_MN = torch.randn(512, 256)
    query, gate = HEAD.split(weight_MN)
    halves = weight_MN.view(4, 128, 256).chunk(2, dim=1)
    assert torch.equal(query, halves[0].reshape(-1, 256)) and torch.equal(gate, halves[1].reshape(-1, 256))


@pytest.mark.parametrize(
    "shape, taken", [((1, 8), False), ((8, 1), False), ((8,), False), ((2, 8), True), ((1, 2, 3), True)]
)
@pytest.mark.parametrize("name", ["DMuon", "GatherMuon", "DistMuon", "Owned:torch.optim.AdamW"])
def test_vectors_fall_through_whatever_their_dimensions(shape, taken, name):
    shapes = {"layers.0.gate": shape, "layers.0.w": (4, 4)}
    groups = assign_parameters(shapes, [("layers", name), (".*", "AdamW")] if not taken else [("layers", name)])
    assert ("layers.0.gate" in groups.groups[0]) == taken
    assert groups.fell_through == (() if taken else (("layers.0.gate", 0),))
    if not taken:
        with pytest.raises(ConfigError, match="matches only vectors"):
            assign_parameters({"layers.0.gate": shape}, [("layers", name), (".*", "AdamW")])
