"""FSDP2's own messages and waits in TensorBoard's scalars, beside an independent count of its collectives."""

import itertools
from time import sleep  # its own: the trainer's, a rank of these tests takes away

import pytest
import torch
import torch.distributed as dist

from tests import titan_runs
from tests.titan_runs import MATRIX_GROUP, TOML, train
from torchtitan_dmuon.footprint import ring_bytes
from torchtitan_dmuon.titan import gather_muon

SLOW = 0.02  # seconds that each collective is made to take
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = titan_runs.make_folder(tmp_path_factory.mktemp("meter"))
    group = MATRIX_GROUP.format(name="DistMuon").replace(', ns_dtype = "float32"', "")
    (made / "DistMuon.toml").write_text(TOML.format(folder=made, name="DistMuon", matrix_group=group))
    return made


def count(made):
    """From now on every gather and sum of FSDP2's on this rank, [kind, bytes, group size, nodes], and slower."""
    calls = []
    replicas = made.config.parallelism.data_parallel_replicate_degree

    def counted(name, kind, whole):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            group = kwargs.get("group")
            tensor = kwargs.get(whole, args[0] if args else None)
            ranks = dist.get_process_group_ranks(group)
            if kind != "sum" or (len(ranks) == replicas and tensor.numel() > 4):  # no norm, nor what owners agree on
                calls.append((kind, tensor.numel() * tensor.itemsize, len(ranks), len({r // 2 for r in ranks})))
                sleep(SLOW)
            return original(*args, **kwargs)

        setattr(dist, name, call)

    counted("all_gather_single", "gather", "output_tensor")
    counted("reduce_scatter_single", "scatter", "input")
    counted("all_reduce", "sum", "tensor")
    gather = gather_muon._gathered

    def gathered(parts, like):
        whole = gather(parts, like)
        if like.device_mesh.size(1) > 1:
            ranks = dist.get_process_group_ranks(like.device_mesh.get_group(1))
            calls.append(("muon", sum(x.numel() * x.itemsize for x in whole), len(ranks), len({r // 2 for r in ranks})))
        return whole

    gather_muon._gathered = gathered
    made.counted = calls


@pytest.mark.parametrize("optimizer, mesh", [("AdamW", (4, 1)), ("GatherMuon", (2, 2)), ("DMuon", (2, 2))])
def test_bytes_and_waits_are_those_of_the_collectives(folder, optimizer, mesh):
    flags = ("--training.steps", str(STEPS), "--metrics.enable_tensorboard")
    results = train(folder, optimizer, 4, *flags, mesh=mesh, ranks_per_node=2, before=count, after=lambda m: m.counted)
    expected = dict.fromkeys(("intra_node", "inter_node"), 0.0)
    for kind, size, ranks, nodes in itertools.chain.from_iterable(r["after"] for r in results):
        if kind == "sum":  # both ways, between nodes where replicas are on several
            share = nodes / ranks if nodes > 1 else 0
            expected["inter_node"] += 2 * size * (ranks - 1) / ranks * share
            expected["intra_node"] += 2 * size * (ranks - 1) / ranks * (1 - share)
        else:  # what other nodes have comes in once a node
            expected["inter_node"] += size * (nodes - 1) / ranks
            expected["intra_node"] += size * (ranks - 1) / ranks - size * (nodes - 1) / ranks
    figures = [m for m in results[0]["metrics"] if "dmuon/step_seconds" in m]
    assert len(figures) == STEPS
    for distance, total in expected.items():
        mine = sum(f[f"dmuon/bytes/{distance}"] - f.get(f"dmuon/owned_bytes/{distance}", 0) for f in figures)
        assert 4 * mine == pytest.approx(total, rel=1e-6), distance
    slow = {"gather": 0, "reduce": 0}
    for kind, *_ in results[0]["after"]:
        if kind != "muon":
            slow["gather" if kind == "gather" else "reduce"] += 1
    for phase, calls in slow.items():
        waited = sum(f[f"dmuon/exposed/{phase}_seconds"] for f in figures)
        assert waited >= 0.9 * SLOW * calls and (waited > 0) == (calls > 0 or optimizer == "DMuon")


def test_what_is_not_counted_is_absent(folder):
    results = train(folder, "DistMuon", 2, "--training.steps", "1", "--metrics.enable_tensorboard", mesh=(1, 2))
    figures = results[0]["metrics"][-1]
    assert figures["dmuon/exposed/gather_seconds"] > 0 and "dmuon/exposed/publish_seconds" not in figures
    assert not [key for key in figures if "bytes" in key]


def test_rings():
    assert ring_bytes(8.0, 4, 1) == (6.0, 0.0) and ring_bytes(8.0, 4, 2) == (4.0, 2.0)
    assert ring_bytes(8.0, 4, 4) == (0.0, 6.0) and ring_bytes(8.0, 1, 1) == (0.0, 0.0)
    assert ring_bytes(8.0, 4, 4, all_reduce=True) == (0.0, 12.0) and ring_bytes(8.0, 4, 2, all_reduce=True) == (
        6.0,
        6.0,
    )
    assert torch.tensor(ring_bytes(8.0, 2, 1, all_reduce=True)).tolist() == [8.0, 0.0]
