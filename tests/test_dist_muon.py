"""TorchTitan's DistMuon from a TOML file: the update of Muon where both take the same matrices, and clear refusals."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests import titan_runs
from tests.ranks import run_ranks
from tests.titan_runs import LAYERS, MATRIX_GROUP, TOML, train
from torchtitan_dmuon.matrices import MatrixLayout, OwnedSpec, canonical_name
from torchtitan_dmuon.muon import Muon
from torchtitan_dmuon.titan import checks, dist_muon, toml_config
from torchtitan_dmuon.titan.config import ConfigError

CONFIGS = Path(__file__).parents[1] / "train_configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = titan_runs.make_folder(tmp_path_factory.mktemp("dist_muon"))
    for name, options in (("DistMuon", "per_head = true"), ("GatherMuon", 'per_head = true, ns_dtype = "bfloat16"')):
        group = MATRIX_GROUP.format(name=name).replace('ns_dtype = "float32"', options)
        (made / f"{name}.toml").write_text(TOML.format(folder=made, name=name, matrix_group=group))
    return made


def weights(made):
    """Whole weights, by name: a collective."""
    named = ((canonical_name(n), p.detach()) for n, p in made.model_parts[0].named_parameters())
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for n, p in named}


def test_its_update_is_muons_on_the_debug_model(folder):
    flags = ("--training.steps", "2", "--metrics.enable_tensorboard")
    mine, theirs = (
        train(folder, n, 2, *flags, mesh=(1, 2), before=weights, after=weights)[0] for n in ("DistMuon", "GatherMuon")
    )
    matrices = [n for n, p in mine["before"].items() if n.startswith("layers.") and p.ndim == 2]
    assert len(matrices) == LAYERS * 5
    for name in matrices:
        assert torch.equal(mine["before"][name], theirs["before"][name])
        ours, own = (each["after"][name] - each["before"][name] for each in (theirs, mine))
        assert 0 < (own - ours).norm() <= 3e-2 * ours.norm(), name
    assert {"lr/DistMuon", "lr/AdamW"} <= mine["metrics"][-1].keys()


OPTIONS = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}


def _toy_rank(rank, world, mesh_shape):
    """Two steps of DistMuon on FSDP2's shards: the weights after them, whole."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    model = _toy()
    for layer in model["layers"]:
        fully_shard(layer, mesh=mesh)
    names, params = zip(*model.named_parameters())
    made = dist_muon.build(model, [{"params": list(params), "param_names": list(names), **OPTIONS}])
    for grads in _toy_grads():
        for param, grad in zip(params, grads):
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        made.step()
    return type(made).__name__, [p.full_tensor().detach() for p in params]


def _toy():
    torch.manual_seed(0)
    shapes = [(24, 16), (16, 24), (16, 16), (18, 10)]
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(n, m, bias=False) for m, n in shapes])})


def _toy_grads():
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=generator) for p in _toy().parameters()] for _ in range(2)]


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1), (1, 3)])
def test_its_update_is_muons_on_every_mesh(mesh):
    """(4, 1): nothing is sharded, and the owners are among the replicas. (1, 3): rows that three does not divide."""
    model = _toy()
    start = [p.detach().clone() for p in model.parameters()]
    muon = Muon(model.parameters(), **OPTIONS, ns_dtype="bfloat16")
    for grads in _toy_grads():
        for param, grad in zip(model.parameters(), grads):
            param.grad = grad
        muon.step()
    for name, after in run_ranks(_toy_rank, mesh[0] * mesh[1], mesh):
        assert name == "DistMuon"
        for own, ours, first in zip(after, model.parameters(), start):
            assert (own - ours).norm() <= 3e-2 * (ours - first).norm()


def test_heads_are_blocks_and_other_matrices_have_one_owner_in_the_bucket_of_their_unit():
    from torchtitan.distributed.flex_shard import BlockShard, Owned

    heads, fused = MatrixLayout(rows=(4, 4, 4)), MatrixLayout(groups=2, rows=(4, 1, 1))
    specs = [
        OwnedSpec("layers.1.wq", (12, 8), heads), OwnedSpec("layers.1.wqkv", (12, 8), fused),
        OwnedSpec("layers.10.wo", (8, 8)), OwnedSpec("adapter.w", (8, 8)),
    ]  # fmt: skip
    made = dist_muon.arguments(specs, ["tok_embeddings", "layers.1", "layers.10"], "dp_shard")
    shardings = {n: dict(layout.shardings_by_mesh_axis) for n, layout in made["compute_sharding_by_fqn"].items()}
    assert shardings["layers.1.wq"] == {"dp_shard": BlockShard(dim=0, block_size=4)}
    assert all(shardings[s.name] == {"dp_shard": Owned()} for s in specs[1:])
    assert [(b.name, b.patterns) for b in made["bucket_configs"]] == [
        ("layers.1", ("layers.1.wq", "layers.1.wqkv")), ("layers.10", ("layers.10.wo",)), ("rest", ("adapter.w",)),
    ]  # fmt: skip


@pytest.mark.parametrize("model", ["debug", "llama3_8b", "llama3_70b", "qwen3_32b"])
def test_its_files_can_run_and_cover_every_matrix(model):
    run, other = (
        toml_config.parse(["--config", str(CONFIGS / f"{model}_{n}.toml")]).config for n in ("dist_muon", "gather_muon")
    )
    degrees = (run.parallelism.data_parallel_replicate_degree, run.parallelism.data_parallel_shard_degree)
    world = degrees[0] * degrees[1]
    taken, others = checks.check_run(run, world), checks.check_run(other, world)
    assert taken.groups == others.groups
    layers = len(run.model_spec.model.layers)
    assert len(taken.groups[0]) == 5 * layers


@pytest.mark.parametrize(
    "flags, world, key, words",
    [
        (["--parallelism.tensor_parallel_degree", "2"], 8, "parallelism.tensor_parallel_degree", "data parallelism"),
        (["--parallelism.pipeline_parallel_degree", "2", "--training.disable_cuda_graphs"], 8,
         "parallelism.pipeline_parallel_degree", "alone"),
        (["--parallelism.context_parallel_degree", "2"], 8, "parallelism.context_parallel_degree", "alone"),
        (["--parallelism.expert_parallel_degree", "2"], 4, "parallelism.expert_parallel_degree", "alone"),
        (["--parallelism.data_parallel_shard_degree", "1", "--parallelism.data_parallel_replicate_degree", "1"], 1,
         "optimizer.param_groups.0.optimizer_name", "one rank has none"),
    ],
)  # fmt: skip
def test_where_it_cannot_run_it_is_refused(flags, world, key, words):
    config = toml_config.parse(["--config", str(CONFIGS / "debug_dist_muon.toml"), *flags]).config
    with pytest.raises(ConfigError, match=words) as error:
        checks.check_run(config, world)
    assert error.value.path == key


def test_two_groups_and_stacks_are_refused(tmp_path):
    text = (CONFIGS / "debug_dist_muon.toml").read_text()
    group = text[text.index("[[optimizer.param_groups]]") : text.rindex("[[optimizer.param_groups]]")]
    narrow = group.replace("(attention|feed_forward)", "attention")
    file = tmp_path / "two.toml"
    file.write_text(text.replace(group, narrow + group))
    with pytest.raises(ConfigError, match="DistMuon takes one parameter group") as error:
        checks.check_run(toml_config.parse(["--config", str(file)]).config, 4)
    assert error.value.path == "optimizer.param_groups.1.optimizer_name"
    text = text.replace('"llama3"', '"deepseek_v3"').replace("llama3_debugmodel", "deepseek_v3_debugmodel")
    file.write_text(text.replace("(attention|feed_forward)", "(attention|moe.routed_experts)"))
    with pytest.raises(ConfigError, match=r"is a stack; DistMuon takes 2-D parameters only"):
        checks.check_run(toml_config.parse(["--config", str(file)]).config, 4)


def test_arguments_of_a_registry_config_are_left_alone():
    config = toml_config.parse(["--config", str(CONFIGS / "debug_dist_muon.toml")]).config
    config.optimizer.optimizer_factory_kwargs_by_name = {"DistMuon": {"bucket_configs": (), "x": 1}}
    config.parallelism.tensor_parallel_degree = 2
    dist_muon.check(config, 8)


def test_the_log_shows_every_option_of_the_rule(monkeypatch):
    from types import SimpleNamespace

    from torchtitan_dmuon.titan import optimizer as container
    from torchtitan_dmuon.titan.gather_muon import GatherMuon

    lines = []
    monkeypatch.setattr(container.logger, "info", lines.append)
    made = GatherMuon([nn.Parameter(torch.zeros(4, 4))], row_beta=0.95, momentum_dtype="bfloat16", ns_steps=6)
    groups = [SimpleNamespace(pattern="layers", optimizer_kwargs={"per_head": True})]
    holder = SimpleNamespace(_groups=groups, owned=None)
    container.DMuonOptimizersContainer._log_optimizer(holder, made, 0, ["layers"])
    line = next(line for line in lines if line.startswith("Optimizer GatherMuon: 1 params [layers]"))
    told = (
        "'ns_steps': 6",
        "'row_beta': 0.95",
        "'momentum_dtype': 'bfloat16'",
        "'per_head': True",
        "'ns_coefficients': 'keller'",
    )
    assert all(words in line for words in told), line
