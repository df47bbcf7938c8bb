"""TorchTitan's own ways out and back in: Hugging Face files of a mixture of experts, asynchronous saves, and a resume with
another optimizer than the checkpoint's."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import titan_runs
from tests.ranks import RankFailed
from tests.titan_runs import MATRIX_GROUP, TOML, masters, train

MUON_GROUP = re.sub(r"adjust_lr_fn.*", "momentum = 0.95 }}", MATRIX_GROUP)
SAVE = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last_save_model_only")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = titan_runs.make_folder(tmp_path_factory.mktemp("titan"))
    name = "Owned:torch.optim.Muon"
    (made / f"{name}.toml").write_text(TOML.format(folder=made, name=name, matrix_group=MUON_GROUP.format(name=name)))
    return made


def run(folder, optimizer, dump, steps, *flags, mesh=(1, 2), **kwargs):
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
    return run(folder, now, tmp_path, 3, *path, *flags)


CHANGES = [("AdamW", "DMuon"), ("DMuon", "AdamW"), ("DMuon", "Owned:torch.optim.Muon")]


@pytest.mark.parametrize(("before", "now"), CHANGES)
def test_another_optimizer_is_refused_by_name_or_begins_its_state_anew(folder, saved, tmp_path, before, now):
    message = r"ConfigError: the checkpoint .*step-2 was written with another optimizer for 15 of \d+ parameters \(first "
    with pytest.raises(RankFailed, match=message + r"layers.*on_optimizer_change = \"restart_state\".*exclude_from_loading"):
        resumed(folder, saved, tmp_path / "refused", before, now)
    results = resumed(folder, saved, tmp_path / "restarted", before, now, "--dmuon.on_optimizer_change", "restart_state")
    assert [step for step, *_ in results[0]["steps"]] == [3]
    assert results[0]["steps"][0][1] < 8.0


@pytest.mark.parametrize(("before", "now"), [("GatherMuon", "DMuon"), ("DMuon", "GatherMuon"), ("Owned:torch.optim.Muon", "DMuon")])
def test_optimizers_of_one_rule_read_each_others_state(folder, saved, tmp_path, before, now):
    results = resumed(folder, saved, tmp_path, before, now)
    assert [step for step, *_ in results[0]["steps"]] == [3]
