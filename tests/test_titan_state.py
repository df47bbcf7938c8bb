"""TorchTitan's own ways out and back in: Hugging Face files of a mixture of experts, asynchronous saves, and a resume
with another optimizer than the checkpoint's."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from safetensors.torch import load_file

from tests import titan_runs
from tests.ranks import RankFailed
from tests.titan_runs import LAYERS, MATRIX_GROUP, TOML, train

MUON_GROUP = re.sub(r"adjust_lr_fn.*", "momentum = 0.95 }}", MATRIX_GROUP)
SAVE = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last_save_model_only")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = titan_runs.make_folder(tmp_path_factory.mktemp("titan"))
    name = "Owned:torch.optim.Muon"
    (made / f"{name}.toml").write_text(TOML.format(folder=made, name=name, matrix_group=MUON_GROUP.format(name=name)))
    return made


def run(folder, optimizer, dump, steps, *flags, mesh=(1, 1), **kwargs):
    flags = ("--dump_folder", str(dump), "--training.steps", str(steps), *SAVE, *flags)
    return train(folder, optimizer, mesh[0] * mesh[1], *flags, mesh=mesh, **kwargs)


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """Two steps and a checkpoint by each optimizer, asynchronously by DMuon."""
    found = {}
    for optimizer in ("AdamW", "GatherMuon", "DMuon", "Owned:torch.optim.Muon"):
        dump = tmp_path_factory.mktemp("saved")
        flags = ("--checkpoint.async_mode", "async") if optimizer == "DMuon" else ()
        run(folder, optimizer, dump, 2, *flags)
        found[optimizer] = dump / "checkpoint" / "step-2"
    return found


def resumed(folder, saved, tmp_path, before, now, *flags):
    path = ("--checkpoint.initial_load_path", str(saved[before]), "--checkpoint.no-initial_load_model_only")
    if before == "AdamW":  # every rank decides alike; the data of one rank are not those of two
        return run(
            folder, now, tmp_path, 3, *path, *flags, "--checkpoint.exclude_from_loading", "dataloader", mesh=(1, 2)
        )
    return run(folder, now, tmp_path, 3, *path, *flags)


CHANGES = [("AdamW", "DMuon"), ("DMuon", "AdamW"), ("DMuon", "Owned:torch.optim.Muon")]


@pytest.mark.parametrize(("before", "now"), CHANGES)
def test_another_optimizer_is_refused_by_name_or_begins_its_state_anew(folder, saved, tmp_path, before, now):
    message = (
        r"ConfigError: the checkpoint .*step-2 was written with another optimizer for 15 of \d+ parameters \(first "
    )
    with pytest.raises(
        RankFailed, match=message + r"layers.*on_optimizer_change = \"restart_state\".*exclude_from_loading"
    ):
        resumed(folder, saved, tmp_path / "refused", before, now)
    results = resumed(
        folder, saved, tmp_path / "restarted", before, now, "--dmuon.on_optimizer_change", "restart_state"
    )
    assert [step for step, *_ in results[0]["steps"]] == [3]
    assert results[0]["steps"][0][1] < 8.0


@pytest.mark.parametrize(
    ("before", "now"), [("GatherMuon", "DMuon"), ("DMuon", "GatherMuon"), ("Owned:torch.optim.Muon", "DMuon")]
)
def test_optimizers_of_one_rule_read_each_others_state(folder, saved, tmp_path, before, now):
    results = resumed(folder, saved, tmp_path, before, now)
    assert [step for step, *_ in results[0]["steps"]] == [3]


def options(made):
    """Betas of every AdamW group, riders' and FSDP2's, and the coefficients of the owners' Muon."""
    groups = [g for each in (*made.optimizers.owned_optimizer.inners, *made.optimizers) for g in each.param_groups]
    return [sorted({tuple(g["betas"]) for g in groups if "betas" in g}), groups[0]["ns_coefficients"]]


def test_options_that_are_arrays_are_the_checkpoints_too(folder, tmp_path):
    toml, coefficients = (folder / "DMuon.toml").read_text(), ((3.44, -4.77, 2.03),)
    arrays = f"{[list(each) for each in coefficients]}"
    (folder / "arrays.toml").write_text(toml.replace('ns_dtype = "float32"', f"ns_coefficients = {arrays}"))
    (folder / "others.toml").write_text(toml.replace("0.95]", "0.6]"))
    run(folder, "arrays", tmp_path, 2)
    (result,) = run(folder, "others", tmp_path, 3, after=options)
    assert result["after"] == [[(0.9, 0.95)], coefficients]


# ---- Hugging Face files of a mixture of experts ----

EXPERTS = """
[[optimizer.param_groups]]
pattern = '^layers\\.\\d+\\.(attention|feed_forward|moe\\.routed_experts)\\.'
optimizer_name = "DMuon"
optimizer_kwargs = { lr = 4e-3, weight_decay = 0.1 }
"""


def weights(path, made):
    """The whole model to a file (results of ranks are small); whether masters are what the file says."""
    whole = made.owned.full_state_dict()
    torch.save(whole, f"{path}.{torch.distributed.get_rank()}")
    experts = {k: v for k, v in made.owned.masters().items() if "experts" in k}
    return len(experts), all(torch.equal(whole[k.partition("[")[0]][int(k[-7:-1])], v) for k, v in experts.items())


def experts_of(name, tensors):
    """The experts of a stack in a Hugging Face file."""
    layer = re.search(r"layers\.(\d+)\.", name)[1]
    kind = {"w1_EFD": "gate_proj", "w2_EDF": "down_proj", "w3_EFD": "up_proj"}[name.rpartition(".")[2]]
    return [tensors[f"model.layers.{layer}.mlp.experts.{e}.{kind}.weight"] for e in range(8)]


def test_experts_leave_for_hugging_face_and_come_back(folder, tmp_path):
    toml = TOML.format(folder=folder, name="experts", matrix_group=EXPERTS)
    (folder / "experts.toml").write_text(toml.replace("llama3", "deepseek_v3"))
    flags = ("--checkpoint.async_mode", "async", "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf")
    after = functools.partial(weights, tmp_path / "first")
    results = run(folder, "experts", tmp_path, 3, *flags, mesh=(1, 2), after=after)
    assert all(count and equal for count, equal in (r["after"] for r in results))
    path = tmp_path / "checkpoint" / "step-3"
    assert (tmp_path / "checkpoint" / "step-2" / ".metadata").exists()  # asynchronously, stacks and all
    tensors = {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
    whole = torch.load(tmp_path / "first.0")
    stacks = [name for name in whole if "inner_experts" in name]
    assert len(stacks) == 3 * (LAYERS - 1)
    for name in stacks:
        assert torch.equal(torch.stack(experts_of(name, tensors)), whole[name]), name

    flags = (
        "--checkpoint.initial_load_in_hf",
        "--checkpoint.initial_load_path",
        str(path),
        "--lr_scheduler.warmup_steps",
        "0",
    )
    flags += tuple(f for i in (0, 1) for f in (f"--optimizer.param_groups.{i}.optimizer_kwargs.lr", "0.0"))
    after = functools.partial(weights, tmp_path / "second")
    run(folder, "experts", tmp_path / "again", 1, *flags, mesh=(2, 2), after=after)
    again = torch.load(tmp_path / "second.3")
    moved = {k for k in whole if not torch.equal(again[k], whole[k])}
    assert again.keys() == whole.keys() and moved <= {k for k in whole if "expert_bias" in k or "tokens_per" in k}
