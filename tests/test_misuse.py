"""What a user may do wrong around owned weights, and what the error then says."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.runtime.lanes import CpuLane
from torchtitan_dmuon.runtime.owned import RankGrid

from .ranks import run_ranks
from .test_runtime import own, tower

ALONE = RankGrid((0,), 1, "cpu")


def alone(**options):
    model = tower()
    return model, dmuon.own_matrices(model, ALONE, select="weight$", units=model.layers, **options)


def test_a_second_optimizer_is_refused():
    _, owned = alone()
    owned.build_optimizer(dmuon.Muon)
    with pytest.raises(ValueError, match="build_optimizer was called before.*groups=..."):
        owned.build_optimizer(torch.optim.AdamW)


def _edit(rank, world):
    model = tower()
    owned = own(model, 1, 2)
    with owned.gathered():
        model.layers[1].up.weight.sum()
    changed = pytest.raises(RuntimeError, match=r"layers.1.up.weight was changed inside .*owned.fill\(name, value_of\)")
    with changed, owned.gathered():
        model.layers[1].up.weight.data.mul_(2)
    owned.close()


def test_a_change_of_gathered_weights_is_not_lost_silently():
    run_ranks(_edit, 2)


def test_stacks_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match="stacks = 'experts' matches no selected parameter with 3 dimensions"):
        alone(stacks="experts")


def test_copies_and_casts_of_an_owning_model(caplog):
    model, _ = alone()
    with pytest.raises(RuntimeError, match="first.weight has one owner, so a model with owned.* cannot be copied"):
        copy.deepcopy(model)
    with caplog.at_level(logging.WARNING):
        model.to("cpu")
        assert not caplog.records
        model.to(torch.bfloat16)
    assert "stays torch.float32 where the model is cast to torch.bfloat16" in caplog.text


def test_a_failed_exchange_says_what_to_look_for():
    lane = CpuLane("test")
    ticket = lane.submit(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="failed on this rank: division by zero. All ranks must run the same passes"):
        ticket.wait()
    lane.close()
