"""QK-clip: largest logits against a dense computation, factors that scale every head's logits by its own gamma, a run
on two ranks whose projections are those of a run without it times the factors, and refusals by name."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from tests import titan_runs
from tests.titan_runs import masters, train
from torchtitan_dmuon.titan import checks, optimizer, toml_config
from torchtitan_dmuon.titan.config import ConfigError, DMuonConfig
from torchtitan_dmuon.titan.optimizer import DMuonOptimizersContainer
from torchtitan_dmuon.titan.qk_clip import QkClip, attention_layers, largest_logits, row_factors

TAU = 0.35


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return titan_runs.make_folder(tmp_path_factory.mktemp("titan"))


def dense_logits(q_BLNH, k_BKGH, allowed, scale=None):
    """All of them at once, one key head repeated for its query heads."""
    k = k_BKGH.repeat_interleave(q_BLNH.shape[2] // k_BKGH.shape[2], dim=2)
    scores = torch.einsum("blnh,bknh->bnlk", q_BLNH, k) * (q_BLNH.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~allowed, -math.inf).amax(dim=(0, 2, 3))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_largest_logits(scale, monkeypatch):
    monkeypatch.setattr("torchtitan_dmuon.titan.qk_clip.CHUNK", 4)
    q, k = torch.randn(2, 11, 6, 8), torch.randn(2, 11, 3, 8)
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    assert torch.allclose(largest_logits(q, k, scale), dense_logits(q, k, causal, scale))
    everything = largest_logits(q, k, scale, causal=False)
    assert torch.allclose(everything, dense_logits(q, k, torch.ones_like(causal), scale))
    documents = torch.tensor([[0] * 5 + [1] * 6, [0] * 11])
    inside = documents[:, None, :, None] == documents[:, None, None, :]

    def same_document(b, h, query, key):
        return (query >= key) & (documents[b, query] == documents[b, key])

    assert torch.allclose(largest_logits(q, k, scale, same_document), dense_logits(q, k, inside & causal, scale))


@pytest.mark.parametrize("fused", [True, False])
def test_each_heads_logits_scale_by_its_own_gamma(fused):
    gamma = torch.tensor([1.0, 0.25, 1.0, 1.0, 0.5, 0.36])
    linear = SimpleNamespace(wqkv=None) if fused else SimpleNamespace(wq=None, wk=None)
    layer = SimpleNamespace(head_dim=2, n_heads=6, n_kv_heads=3, qkv_linear=linear)
    factors = row_factors(layer, gamma)
    if fused:
        query, key, value = factors["wqkv"].view(3, 4, 2).split((2, 1, 1), dim=1)
        assert (value == 1).all()
    else:
        query, key = factors["wq"].view(3, 2, 2), factors["wk"].view(3, 1, 2)
    assert torch.allclose((query * key)[..., 0].flatten(), gamma)
    assert torch.allclose(key[:, 0, 0], torch.tensor([0.5, 1.0, 0.6]))  # sqrt of the smallest of its heads
    assert (key <= 1).all()


def test_projections_on_two_ranks_are_those_without_it_times_the_factors(folder):
    def watch(trainer):
        seen, masks = [], []  # all layers get one mask
        for layer in attention_layers(trainer.model_parts[0], trainer.owned.names).values():

            def hook(module, args, kwargs):
                queries = torch.arange(args[0].shape[1])
                mask = kwargs["attention_masks"].mask_mod
                if not masks:
                    each = [[mask(torch.tensor(b), 0, q, queries) for q in queries] for b in range(len(args[0]))]
                    masks.append(torch.stack([torch.stack(rows) for rows in each])[:, None])
                seen.append(dense_logits(args[0].detach(), args[1].detach(), masks[0], kwargs["scale"]))

            layer.inner_attention.register_forward_pre_hook(hook, with_kwargs=True)
        return seen

    flags = ("--training.steps", "1")
    off = train(folder, "DMuon", 2, *flags, mesh=(1, 2), before=watch, after=masters)
    on = train(folder, "DMuon", 2, *flags, "--dmuon.qk_clip", str(TAU), mesh=(1, 2), after=masters)
    logits = torch.stack([torch.stack(rank["before"]) for rank in off]).amax(dim=0)
    assert (logits > TAU).any() and (logits < TAU).any(), logits
    config = titan_runs.parse(["--config", str(folder / "DMuon.toml")]).config
    model = checks.meta_model(config)
    names = [n for n, _ in model.named_parameters()]
    expected = {key: value for rank in off for key, value in rank["after"].items()}
    found = {key: value for rank in on for key, value in rank["after"].items()}
    for (name, layer), logits_N in zip(attention_layers(model, names).items(), logits):
        key = f"{name}.qkv_linear.wqkv.weight[000000]"
        expected[key] = expected[key] * row_factors(layer, (TAU / logits_N).clamp(max=1))["wqkv"][:, None]
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[k], v, rtol=1e-5, atol=1e-8) for k, v in expected.items())


def test_what_a_bad_step_leaves_behind_scales_nothing(folder, monkeypatch):
    """Logits that are not finite are not taken up, and those of a skipped step are forgotten."""
    model = checks.meta_model(toml_config.parse(["--config", str(folder / "DMuon.toml")]).config)
    engine = SimpleNamespace(device="cpu", control=SimpleNamespace(all_reduce=lambda *_: None))
    owned = SimpleNamespace(names=[n for n, _ in model.named_parameters()], engine=engine)
    clip = QkClip(model, owned, tau=1.0)
    kernel = next(iter(clip.layers.values())).inner_attention
    watch = clip._hook(0)
    q, k = torch.full((1, 2, clip.largest.shape[1], 4), 0.1), torch.ones(1, 2, clip.largest.shape[1], 4)
    for bad in (math.nan, math.inf):
        q[0, 0, 0, 0] = bad
        watch(kernel, (q, k), {})
    clip.collect()
    assert clip.factors and all((factor_M == 1).all() for factor_M in clip.factors.values())

    watch(kernel, (torch.full_like(q, 100.0), k), {})
    assert clip.largest.max() > 1.0
    skipping = SimpleNamespace(skip_step=lambda: None, skipped_in_a_row=1)
    container = SimpleNamespace(owned_optimizer=skipping, _qk_clip=clip, _model=model)
    monkeypatch.setattr(optimizer, "dmuon_config_of", lambda _model: DMuonConfig())
    DMuonOptimizersContainer._skip_step(container)
    assert (clip.largest == -math.inf).all()


def test_refused_by_name(folder):
    def error(change, *flags):
        config = toml_config.parse(["--config", str(folder / "DMuon.toml"), "--dmuon.qk_clip", "100", *flags]).config
        change(config)
        with pytest.raises(ConfigError, match="^qk_clip") as info:
            checks.check_run(config, None)
        assert info.value.path == "dmuon.qk_clip"
        return str(info.value)

    def only_ffn(config):
        config.optimizer.param_groups[0].pattern = r"feed_forward"

    def compiled(config):
        config.compile = dataclasses.replace(config.compile, enable=True)

    assert "layers.0.attention.qkv_linear.wqkv.weight is not given to DMuon" in error(only_ffn)
    assert "compile.enable = false" in error(compiled)
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

    with pytest.raises(ConfigError, match=r"layers\.0\.attention normalizes queries and keys"):
        attention_layers(checks.meta_model(qwen3_debugmodel()), [])
