"""TorchTitan's Trainer with owned matrices: the run of gather-then-replicate Muon, on every setting a user may turn."""

import json
import pathlib
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import titan_runs
from tests.titan_runs import LAYERS, masters, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return titan_runs.make_folder(tmp_path_factory.mktemp("titan"))


@pytest.fixture(scope="module")
def gather(folder):
    """Ten steps of gather-then-replicate Muon, fp32 compute and fp32 NS, with three validations."""
    return train(folder, "GatherMuon", 4, "--validator.enable")


@pytest.fixture(scope="module")
def dmuon(folder):
    """Ten steps of DMuon with three validations and a checkpoint after the fifth and after the last."""

    def after(made):
        assert all(module.training for part in made.model_parts for module in part.modules())
        return masters(made)

    flags = ("--checkpoint.enable", "--checkpoint.interval", "5", "--checkpoint.no-last_save_model_only")
    return train(folder, "DMuon", 4, *flags, "--validator.enable", after=after)


def losses(results):
    return [loss for _, loss, _ in results[0]["steps"]]


def test_dmuon_equals_gather_then_replicate_muon_for_ten_steps(gather, dmuon):
    mine = losses(dmuon)
    assert len(mine) == len(losses(gather)) == 10
    assert max(abs(a - b) for a, b in zip(mine, losses(gather))) < 1e-3
    assert mine[-1] < mine[0] - 0.5


def test_validation_sees_the_same_weights_on_every_rank_and_leaves_the_figures_of_steps_alone(gather, dmuon):
    """That it leaves weights alone is seen by the resumed run below, which has none and repeats every digit."""
    for mine, other in zip(dmuon, gather):
        assert [step for step, _ in mine["validations"]] == [1, 5, 10]
        assert mine["validations"] == dmuon[0]["validations"]
        assert all(abs(a - b) < 1e-3 for (_, a), (_, b) in zip(mine["validations"], other["validations"]))
    after_validation, plain = (dmuon[0]["metrics"][index]["dmuon/owned_bytes/intra_node"] for index in (5, 6))
    assert after_validation == pytest.approx(plain, rel=0.01)
    assert dmuon[0]["validations"][-1][1] < dmuon[0]["validations"][0][1] - 0.5


def test_resuming_repeats_losses_digit_for_digit_and_momentum_bit_for_bit(folder, dmuon, tmp_path):
    flags = ("--checkpoint.enable", "--checkpoint.interval", "5", "--checkpoint.no-last_save_model_only")
    again = train(folder, "DMuon", 4, *flags, "--checkpoint.load_step", "5", after=masters)
    assert losses(again) == losses(dmuon)[5:]
    for first, second in zip(dmuon, again):
        assert first["after"].keys() == second["after"].keys() and first["after"]
        assert all(torch.equal(v, second["after"][k]) for k, v in first["after"].items())


def test_a_checkpoint_has_one_key_per_parameter(folder, dmuon):
    reader = dcp.FileSystemReader(folder / "DMuon" / "checkpoint" / "step-10")
    metadata = reader.read_metadata().state_dict_metadata
    weights = [k for k in metadata if k.startswith("layers.") and k.endswith(".weight")]
    # Of a layer: wq, wk, wv, wo, w1, w2, w3 and two norms; the fused weight is stored in TorchTitan's layout.
    assert len(weights) == LAYERS * 9
    momenta = [k for k in metadata if k.endswith(".momentum_buffer")]
    assert len(momenta) == LAYERS * 5 and all(k.startswith("optimizer.state.layers.") for k in momenta)
    assert all(len(metadata[k].chunks) == 1 for k in momenta)


def test_a_run_without_riders_continues_one_with_them_under_the_same_keys(folder, dmuon, tmp_path):
    first = folder / "DMuon" / "checkpoint"
    flags = ("--checkpoint.enable", "--checkpoint.interval", "5", "--checkpoint.no-last_save_model_only")
    flags += ("--checkpoint.initial_load_path", str(first / "step-5"), "--checkpoint.no-initial_load_model_only")
    again = train(folder, "DMuon", 4, *flags, "--dump_folder", str(tmp_path), "--dmuon.no-riders")
    assert losses(again) == pytest.approx(losses(dmuon)[5:], abs=1e-4)
    paths = (first / "step-10", tmp_path / "checkpoint" / "step-10")
    with_, without = (dcp.FileSystemReader(path).read_metadata().state_dict_metadata for path in paths)
    assert without.keys() == with_.keys()
    small = {k: v.size for k, v in without.items() if re.search(r"layers\.\d\.\w+_norm\.weight(\.exp_avg(_sq)?)?$", k)}
    assert len(small) == LAYERS * 2 * 3 and all(with_[k].size == size for k, size in small.items())
    values = []
    for path in paths:
        values.append({k: torch.empty(size) for k, size in small.items()})
        dcp.load(values[-1], checkpoint_id=path, no_dist=True)
    for key, value in values[0].items():
        assert (values[1][key] - value).norm() < 1e-3 * value.norm(), key


@pytest.mark.parametrize(
    "flags",
    [
        ("--parallelism.fsdp_reshard_after_forward", "never", "--dmuon.routing", "flat", "--dmuon.publish", "sync"),
        ("--dmuon.ownership", "replica", "--dmuon.balance", "round_robin", "activation-checkpoint:full"),
        ("--dmuon.prefetch", "0", "--parallelism.spmd_backend", "partial_dtensor", "activation-checkpoint:selective"),
    ],
    ids=lambda f: " ".join(f).replace("--", ""),
)
def test_every_setting_gives_the_same_losses(folder, gather, flags):
    mine = losses(train(folder, "DMuon", 4, "--training.steps", "3", *flags))
    assert len(mine) == 3
    assert max(abs(a - b) for a, b in zip(mine, losses(gather))) < 1e-3


def test_owned_adamw_trains_as_adamw_does(folder):
    flags = ("--training.steps", "3", "--metrics.enable_tensorboard")
    counts = lambda made: made.optimizers._owned_counts  # noqa: E731  (as logged: of the cluster, not of the rank)
    owned = train(folder, "Owned:torch.optim.AdamW", 4, *flags, before=counts)
    assert all(r["before"] == [LAYERS * 5, LAYERS * 2] for r in owned)  # matrices, and the norms that ride
    mine, stock = losses(owned), losses(train(folder, "AdamW", 4, *flags))
    assert max(abs(a - b) for a, b in zip(mine, stock)) < 1e-4 and mine[-1] < mine[0] - 0.1
    figures = owned[0]["metrics"][-1]
    assert (
        figures["lr/OwnedAdamW/0"] == figures["lr/OwnedAdamW/1"] == figures["lr/AdamW"]
        and figures["dmuon/update_seconds"] > 0
    )


def test_node_holders_keep_gathers_inside_nodes_at_the_same_losses(folder, gather):
    flags = ("--training.steps", "2", "--dmuon.holders", "node", "--metrics.enable_tensorboard")
    count = lambda made: sum(p.numel for p in made.owned.plan.pieces)  # noqa: E731
    results = train(folder, "DMuon", 4, *flags, mesh=(1, 4), ranks_per_node=2, after=count)
    assert max(abs(a - b) for a, b in zip(losses(results), losses(gather))) < 1e-3
    # Both in fp32: every gradient crosses once, every new weight once, shared by four ranks.
    expected = (4 + 4) * results[0]["after"] / 4
    assert results[0]["metrics"][-1]["dmuon/owned_bytes/inter_node"] == pytest.approx(expected, rel=0.01)


def test_every_mesh_and_clip_starts_from_the_same_weights_and_trains(folder):
    """Batches differ with the world, initial weights do not. Without a joint norm updates are made during backward,
    under the bound of the step before where they are clipped."""

    def initial(world, mesh, clip):
        text = (folder / "DMuon.toml").read_text() + f'[dmuon]\nclip = "{clip}"\n'
        (folder / "clip.toml").write_text(text)
        prepared = []

        def before(made):
            engine = made.owned.engine
            if (early := engine.early) is not None:
                engine.early = lambda unit: prepared.append(early(unit)) or prepared[-1]
            return masters(made)

        def after(made):
            return made.owned.engine.clip, sum(len(updates) for _, updates in prepared)

        steps = "2" if clip == "per_matrix" else "1"
        results = train(folder, "clip", world, "--training.steps", steps, mesh=mesh, before=before, after=after)
        assert all(5.0 < loss < 9.0 for _, loss, _ in results[0]["steps"])
        assert {r["after"][0] for r in results} == {clip}
        updates = sum(r["after"][1] for r in results)
        assert updates == 0 if clip == "joint" else updates >= LAYERS * 5
        return {k: v for r in results for k, v in r["before"].items()}

    one = initial(1, (1, 1), "joint")
    assert len(one) == LAYERS * (5 + 2)  # matrices and riders
    for world, mesh, clip in ((2, (1, 2), "per_matrix"), (4, (4, 1), "adamw_only"), (4, (1, 4), "joint")):
        other = initial(world, mesh, clip)
        assert other.keys() == one.keys()
        assert all(torch.equal(one[k], other[k]) for k in one)


def test_accumulation_defers_the_reduce_between_nodes(folder):
    """Four micro-batches cross nodes as often as one; without deferring, four times as often."""

    def sent(*flags):
        results = train(
            folder, "DMuon", 4, "--training.steps", "2", *flags, "--metrics.enable_tensorboard", ranks_per_node=2
        )
        return losses(results), [m for m in results[0]["metrics"] if m]

    one, (*_, first) = sent()
    many = ("--training.global_batch_size", "32")
    deferred, (*_, second) = sent(*many, "--dmuon.defer_reduce", "True")
    eager, (*_, third) = sent(*many, "--dmuon.defer_reduce", "False")
    assert second["dmuon/owned_bytes/inter_node"] == first["dmuon/owned_bytes/inter_node"]
    # Publish and reduce carry as many bytes in fp32: one publish and four reduces against one and one.
    assert third["dmuon/owned_bytes/inter_node"] == pytest.approx(2.5 * first["dmuon/owned_bytes/inter_node"], rel=0.01)
    assert second["dmuon/owned_bytes/intra_node"] > 2.5 * first["dmuon/owned_bytes/intra_node"]
    assert max(abs(a - b) for a, b in zip(deferred, eager)) < 1e-4


def test_metrics_say_where_the_time_goes(folder, dmuon):
    wanted = {
        "dmuon/step_seconds", "dmuon/update_seconds", "dmuon/ns_share", "dmuon/owner_imbalance",
        "dmuon/exposed/gather_seconds", "dmuon/exposed/reduce_seconds", "dmuon/exposed/publish_seconds",
        "dmuon/bytes/intra_node", "dmuon/bytes/inter_node", "dmuon/update_seconds_max_over_median",
    }  # fmt: skip
    figures = dmuon[0]["metrics"][-1]
    assert wanted <= figures.keys()
    assert 0 < figures["dmuon/update_seconds"] < figures["dmuon/step_seconds"]
    assert 0 < figures["dmuon/ns_share"] < 1
    assert figures["dmuon/update_seconds_max_over_median"] >= 1


def test_the_plan_is_saved_and_the_rates_keep_their_ratio(folder, dmuon):
    plan = json.loads(pathlib.Path(folder / "DMuon" / "ownership_plan.json").read_text())
    assert plan["matrices"] == LAYERS * 7 and plan["pieces"] == LAYERS * 5 and plan["idle_owners"] == 0
    ratios = set()
    for figures in dmuon[0]["metrics"]:
        rates = {k: v for k, v in figures.items() if re.match(r"lr/", k)}
        matrix = next(v for k, v in rates.items() if "DMuon" in k)
        rest = next(v for k, v in rates.items() if "AdamW" in k)
        ratios.add(round(matrix / rest, 9))
    assert ratios == {4.0}
