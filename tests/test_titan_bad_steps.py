"""TorchTitan's Trainer and steps with a gradient that is not finite: nothing moves, all is counted, and too many in a
row end the run before a checkpoint that says nothing new purges a sound one."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from tests import titan_runs
from tests.titan_runs import train

MOE_GROUP = r"""
[[optimizer.param_groups]]
pattern = '^layers\.\d+\.(attention|feed_forward|moe\.experts)\.'
optimizer_name = "DMuon"
optimizer_kwargs = { lr = 4e-3, adjust_lr_fn = "match_rms_adamw", ns_dtype = "float32" }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = titan_runs.make_folder(tmp_path_factory.mktemp("titan"))
    text = titan_runs.TOML.format(folder=folder, name="moe", matrix_group=MOE_GROUP)
    text = text.replace('"llama3"', '"deepseek_v3"').replace("llama3_debugmodel", "deepseek_v3_debugmodel")
    (folder / "moe.toml").write_text(text)
    return folder


def _everything(made: Any) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer states of this rank, and the rates."""
    found = {f"buffer {n}": b for part in made.model_parts for n, b in part.named_buffers()}
    for index, optimizer in enumerate(made.optimizers.optimizers):
        for group in optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"]):
                values = {"value": p.detach(), **optimizer.state.get(p, {})}
                found |= {f"{index} {name} {key}": value for key, value in values.items()}
    return {k: (v.to_local() if hasattr(v, "to_local") else v).clone() for k, v in found.items()}


def _spoil(made: Any, bad: Any) -> dict[str, Any]:
    """Before the training: an inf in rank 1's part of the head's gradient in each step for which ``bad(step)``; what
    each step changed, the hooks around it and the rate that it had. The training may end in an error, which is kept."""
    seen: dict[str, Any] = {"moved": [], "hooks": [], "rates": [], "error": "", "told": []}
    compute, step, run = made.forward_backward_step, made.optimizers.step, made.train

    def spoilt(**kwargs: Any) -> torch.Tensor:
        loss = compute(**kwargs)
        if bad(made.step) and torch.distributed.get_rank() == 1:
            made.model_parts[0].lm_head.weight.grad.to_local().view(-1)[0] = float("inf")
        return loss

    def watched() -> None:
        before = _everything(made)
        seen["rates"].append(made.optimizers.optimizers[0].param_groups[0]["lr"])
        try:
            step()
        finally:
            after = _everything(made)
            # Counts of tokens are of the forward; a step of either kind begins new ones.
            moved = {k for k in before if "tokens_per_expert" not in k and not torch.equal(before[k], after[k])}
            assert before.keys() <= after.keys()
            assert all(not v.any() for k, v in after.items() if "tokens_per_expert" in k)
            seen["moved"].append(moved | (after.keys() - before.keys()))

    def caught() -> None:
        try:
            run()
        except RuntimeError as error:
            seen["error"] = f"{type(error).__name__}: {error}"

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen["told"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    made.optimizers.register_step_pre_hook(lambda *_: seen["hooks"].append(made.step))
    made.optimizers.register_step_post_hook(lambda *_: seen["hooks"].append(made.step))
    made.forward_backward_step, made.optimizers.step, made.train = spoilt, watched, caught
    return seen


def test_nothing_moves_in_a_skipped_step(folder) -> None:
    """Neither the bias of experts, which a hook of the step moves, nor weights or states; rates do, with the steps."""
    flags = ("--training.steps", "5", "--metrics.enable_tensorboard")
    results = train(folder, "moe", 2, *flags, mesh=(1, 2), before=lambda made: _spoil(made, lambda s: s in (2, 3)))
    for result in results:
        seen = result["before"]
        assert seen["error"] == ""
        first, second, third, fourth, _ = seen["moved"]
        assert not second and not third
        assert any("expert_bias" in k for k in first) and any("expert_bias" in k for k in fourth)
        assert any("exp_avg" in k for k in fourth) and any("momentum_buffer" in k for k in fourth)
        assert seen["hooks"] == [1, 1, 4, 4, 5, 5]
        assert seen["rates"][0] < seen["rates"][1] and seen["rates"][2] > seen["rates"][3]
    figures = [m for m in results[0]["metrics"] if "dmuon/skipped_steps" in m]
    assert [m["dmuon/skipped_steps"] for m in figures] == [0, 1, 2, 2, 2]
    assert [m["dmuon/skipped_steps_in_a_row"] for m in figures] == [0, 1, 2, 0, 0]
    told = [line for line in results[1]["before"]["told"] if "skipped" in line]
    assert [re.findall(r"\((.*)\)", line) for line in told] == [["1 in all, 1 in a row"], ["2 in all, 2 in a row"]]


def _saved(folder: Any, name: str) -> list[str]:
    return sorted(path.name for path in (folder / name / "checkpoint").iterdir())


def test_too_many_in_a_row_end_the_run_on_all_ranks_and_keep_sound_checkpoints(folder) -> None:
    flags = ("--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2")
    flags += ("--dmuon.max_skipped_steps", "3", "--training.steps", "8")
    results = train(folder, "DMuon", 2, *flags, mesh=(1, 2), before=lambda made: _spoil(made, lambda s: s > 3))
    errors = {r["before"]["error"] for r in results}
    assert len(errors) == 1
    assert re.match("NonFiniteGradients: gradients were not finite in 3 steps in a row.*load_step", *errors)
    assert all(len(r["before"]["moved"]) == 6 for r in results)
    assert _saved(folder, "DMuon") == ["step-2", "step-3"]
    assert "step 4 was skipped: no checkpoint is saved" in results[0]["before"]["told"]


def test_a_rate_that_breaks_the_model_does_not_end_well(folder, tmp_path) -> None:
    """Weights are finite and useless after one step: the loss stays, and every gradient is inf."""
    flags = ("--checkpoint.enable", "--checkpoint.interval", "1", "--dmuon.on_nonfinite", "raise")
    flags += ("--optimizer.param_groups.1.optimizer_kwargs.lr", "1e30", "--dump_folder", str(tmp_path / "run"))
    (result,) = train(folder, "DMuon", 1, *flags, mesh=(1, 1), before=lambda made: _spoil(made, lambda s: False))
    assert re.match('NonFiniteGradients: a gradient is not finite.*on_nonfinite is "raise"', result["before"]["error"])
    assert _saved(tmp_path, "run") == ["step-1"]


def test_a_gradient_that_vanished_is_told_once(folder) -> None:
    def before(made: Any) -> Any:
        log = made.metrics_processor.log
        made.metrics_processor.log = lambda step, mean, most, norm, **rest: log(step, mean, most, 0.0, **rest)
        return _spoil(made, lambda s: False)

    (result,) = train(folder, "DMuon", 1, "--training.steps", "2", mesh=(1, 1), before=before)
    told = [line for line in result["before"]["told"] if "gradient norm" in line]
    assert len(told) == 1 and told[0].startswith("the gradient norm is 0 at step 1: nothing is learned")
