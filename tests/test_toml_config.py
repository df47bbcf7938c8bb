"""TOML over registry configs: what merges, what is refused and in which words, and what is saved runs again."""

import dataclasses
import errno
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tomli
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan_dmuon import train
from torchtitan_dmuon.muon import settings_of
from torchtitan_dmuon.titan import checks, places, platform, toml_config
from torchtitan_dmuon.titan.config import ConfigError, DMuonConfig, assign_parameters
from torchtitan_dmuon.titan.toml_lines import key_lines

platform.prepare()

from torchtitan_dmuon.titan.models import dmuon_specs  # noqa: E402
from torchtitan_dmuon.titan.planning import owned_optimizer  # noqa: E402

JOB = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'
GROUPS = """
[[optimizer.param_groups]]
pattern = 'layers\\.\\d+\\.(attention|feed_forward)\\.'
optimizer_name = "DMuon"
optimizer_kwargs = { lr = 3e-4, weight_decay = 0.1, momentum = 0.95, adjust_lr_fn = "match_rms_adamw" }

[[optimizer.param_groups]]
pattern = '.*'
optimizer_name = "AdamW"
optimizer_kwargs = { lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1 }
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file run.toml and be in its folder, so that messages name it as ``run.toml``."""
    monkeypatch.chdir(tmp_path)

    def write(text, job=JOB):
        (tmp_path / "run.toml").write_text(job + text)
        return "run.toml"

    return write


def _error(file, *flags, world=None):
    """The message that this file and these flags are refused with, by parsing or by the checks after it."""
    with pytest.raises(ConfigError) as info:
        run = toml_config.parse(["--config", file, *flags])
        try:
            checks.check_run(run.config, world)
        except ConfigError as error:
            raise run.source.locate(error) from None
    return str(info.value)


# --- what merges --------------------------------------------------------------------------------------------------


def test_tables_merge_into_the_registry_config(write):
    config = toml_config.load(write("[training]\nsteps = 7\nmax_norm = 2\n" + GROUPS)).config
    assert (config.training.steps, config.training.max_norm) == (7, 2.0)
    assert config.training.local_batch_size == 8  # llama3_debugmodel's own
    assert [g.optimizer_name for g in config.optimizer.param_groups] == [
        "DMuon",
        "AdamW",
    ]  # the array replaced the list
    assert config.optimizer.param_groups[1].optimizer_kwargs["betas"] == (0.9, 0.95)
    assert config.dmuon == DMuonConfig()


def test_sections_with_variants_switch_by_type(write):
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.hf_datasets.text_datasets import InterleavedHuggingFaceTextDataLoader

    config = toml_config.load(
        write(
            """
[activation_checkpoint]
type = "full"
[loss]
type = "CrossEntropyLoss"
[dataloader]
type = "torchtitan.hf_datasets.text_datasets:InterleavedHuggingFaceTextDataLoader"
num_workers = 1
[[dataloader.sources]]
dataset = "c4_test"
weight = 2
[validator.dataloader]
dataset = "c4_test"
[tokenizer]
type = "HuggingFaceTokenizer"
[checkpoint]
type = "CheckpointManager"
interval = 3
"""
        )
    ).config
    assert type(config.activation_checkpoint) is FullAC.Config
    assert type(config.loss) is CrossEntropyLoss.Config
    assert type(config.dataloader) is InterleavedHuggingFaceTextDataLoader.Config
    assert config.dataloader.num_workers == 1
    assert (config.dataloader.sources[0].dataset, config.validator.dataloader.dataset) == ("c4_test", "c4_test")
    assert config.checkpoint.interval == 3


def test_none_switches_off(write):
    config = toml_config.load(
        write('[activation_checkpoint]\ntype = "none"\n[lr_scheduler]\ndecay_ratio = "none"\n')
    ).config
    assert config.activation_checkpoint is None and config.lr_scheduler.decay_ratio is None


def test_the_command_line_wins_over_the_file(write):
    file = write("[training]\nsteps = 7\nseq_len = 128\n" + GROUPS)
    flags = ["--training.steps", "9", "--dmuon.routing", "flat", "--dmuon.defer_reduce", "False"]
    flags += ["--optimizer.param_groups.0.optimizer_kwargs.lr", "0.02"]
    run = toml_config.parse(["--config", file, *flags])
    assert (run.config.training.steps, run.config.training.seq_len) == (9, 128)
    assert (run.config.dmuon.routing, run.config.dmuon.defer_reduce) == ("flat", False)
    assert run.config.optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.02
    assert run.config.optimizer.param_groups[1].optimizer_kwargs["lr"] == 3e-4


def test_a_plain_registry_config_runs_unchanged():
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.trainer import Trainer

    run = toml_config.parse(["--module", "llama3", "--config=llama3_debugmodel", "--training.steps", "4"])
    assert type(run.config) is Trainer.Config
    plain = llama3_debugmodel()
    plain.training.steps = 4
    assert run.config.model_spec.parallelize_fn is plain.model_spec.parallelize_fn
    assert {**run.config.to_dict(), "model_spec": 0} == {**plain.to_dict(), "model_spec": 0}


def test_torchtitans_own_config_manager_finds_the_file(write):
    from torchtitan.config import ConfigManager

    file = write("[training]\nsteps = 7\n" + GROUPS)
    config = ConfigManager().parse_args(["--module", "torchtitan_dmuon", "--config", file, "--training.seq_len", "64"])
    assert (config.training.steps, config.training.seq_len) == (7, 64)
    assert config.training.disable_cuda_graphs  # DMuon's hooks do not run when a graph is replayed
    assert config.dmuon == DMuonConfig()


def test_torchtitans_own_config_manager_ends_with_code_2(write, capsys):
    from torchtitan.config import ConfigManager

    file = write("[training]\nstep = 7\n")
    with pytest.raises(SystemExit) as info:
        ConfigManager().parse_args(["--module", "torchtitan_dmuon", "--config", file])
    assert info.value.code == 2
    assert capsys.readouterr().err.startswith("error: run.toml:5: in [training]: unknown key 'step'")


# --- what is refused ----------------------------------------------------------------------------------------------

# Arguments with a line each.
ARGUMENTS = "optimizer_kwargs.lr = 3e-4\noptimizer_kwargs.ns_steps = 100"
REFUSED = {
    "unknown key": (
        "[training]\nlocal_bach_size = 8\n",
        "run.toml:5: in [training]: unknown key 'local_bach_size'. Did you mean 'local_batch_size'",
    ),
    "unknown table": (
        "[trainning]\nsteps = 8\n",
        "run.toml:4: unknown table or key 'trainning'. Did you mean 'training'",
    ),
    "wrong type": (
        '[training]\nsteps = "8"\n',
        "run.toml:5: in [training]: steps = '8': expected an integer, found a string",
    ),
    "bool as integer": (
        "[training]\n\nsteps = true\n",
        "run.toml:6: in [training]: steps = True: expected an integer, found true or false",
    ),
    "integer as bool": (
        "[training]\ngc_debug = 1\n",
        "run.toml:5: in [training]: gc_debug = 1: expected true or false, found an integer",
    ),
    "bad choice": (
        '[training]\nmixed_precision_param = "float23"\n',
        'run.toml:5: in [training]: mixed_precision_param = \'float23\': expected one of "bfloat16", "float32", '
        "found a string. Did you mean 'float32' or 'bfloat16'?",
    ),
    "bad dmuon choice": (
        '[dmuon]\nrouting = "two_levels"\n',
        'run.toml:5: in [dmuon]: routing = \'two_levels\': expected one of "two_level", "flat", found a',
    ),
    "dmuon key": (
        "[dmuon]\nprefetsh = 1\n",
        "run.toml:5: in [dmuon]: unknown key 'prefetsh'. Did you mean 'prefetch'?",
    ),
    "dmuon value": ("[dmuon]\nprefetch = -1\n", "run.toml:5: in [dmuon]: prefetch = -1: must be at least 0"),
    "value as table": (
        "[training.steps]\nx = 1\n",
        "run.toml:4: in [training]: steps = {'x': 1}: expected an integer, found a table",
    ),
    "table as value": ("training = 3\n", "run.toml:1: 'training' is a table: write [training], not training = 3"),
    "unknown variant": (
        '[activation_checkpoint]\ntype = "selectiv"\n',
        "run.toml:5: in [activation_checkpoint]: unknown variant 'selectiv'. Did you mean 'selective'?",
    ),
    "variant that cannot be imported": (
        '[loss]\ntype = "torchtitan.components.loss:NoLoss"\n',
        "run.toml:5: in [loss]: 'torchtitan.components.loss:NoLoss' cannot be imported",
    ),
    "variant of something else": (
        '[loss]\ntype = "torchtitan.components.tokenizer:HuggingFaceTokenizer"\n',
        "run.toml:5: in [loss]: 'torchtitan.components.tokenizer:HuggingFaceTokenizer' is no ",
    ),
    "value the section refuses": (
        "[validator]\nsteps = 0\n",
        "run.toml:5: in [validator]: validation steps must be positive or -1",
    ),
    "group without its pattern": (
        '[[optimizer.param_groups]]\noptimizer_name = "AdamW"\n',
        "run.toml:4: in [optimizer.param_groups.0]: key 'pattern' is missing",
    ),
    "the model": ('model_spec = "x"\n', "run.toml:1: the model comes from the registry config"),
    "not TOML": ("[training]\nsteps = \n", "run.toml:5: not valid TOML: "),
    "given twice": ("[training]\nsteps = 1\nsteps = 2\n", "run.toml:6: not valid TOML: "),
    "pattern without a parameter": (
        GROUPS.replace("attention", "atention").replace("feed_forward", "feedforward"),
        "run.toml:6: in [optimizer.param_groups.0]: pattern 'layers\\.\\d+\\.(atention|feedforward)\\.' matches no "
        "parameter; names look like tok_embeddings.weight, layers.",
    ),
    "pattern left without a parameter": (
        GROUPS.replace("'layers", "'.*|layers")
        .replace('"DMuon"', '"AdamW"')
        .replace("momentum = 0.95, ", "")
        .replace(', adjust_lr_fn = "match_rms_adamw"', ""),
        "run.toml:11: in [optimizer.param_groups.1]: pattern '.*' is left without a parameter",
    ),
    "pattern of 1-D parameters": (
        GROUPS.replace("(attention|feed_forward)\\.", "attention_norm"),
        "run.toml:6: in [optimizer.param_groups.0]: pattern 'layers\\.\\d+\\.attention_norm' matches only",
    ),
    "embedding under DMuon": (
        GROUPS.replace("'layers", "'tok_embeddings|layers"),
        "run.toml:6: in [optimizer.param_groups.0]: tok_embeddings.weight [2048, 256] is an embedding: no matrix",
    ),
    "not a pattern": (
        GROUPS.replace("'.*'", "'(.*'"),
        "run.toml:11: in [optimizer.param_groups.1]: pattern '(.*' is not a",
    ),
    "parameters nobody takes": (
        GROUPS.replace("'.*'", "'norm'"),
        "run.toml:5: in [optimizer]: no group takes 2 parameters (tok_embeddings.weight, lm_head.weight)",
    ),
    "unknown optimizer": (
        GROUPS.replace('"DMuon"', '"DMoun"'),
        "run.toml:7: in [optimizer.param_groups.0]: unknown optimizer 'DMoun'. Did you mean 'DMuon'",
    ),
    "owned optimizer that cannot be imported": (
        GROUPS.replace('"DMuon"', '"Owned:torch.optim.Moun"'),
        "run.toml:7: in [optimizer.param_groups.0]: 'torch.optim.Moun' cannot be imported: ",
    ),
    "owned optimizer of a package that is missing": (
        GROUPS.replace('"DMuon"', '"Owned:no_such_package.SOAP"'),
        "run.toml:7: in [optimizer.param_groups.0]: 'no_such_package.SOAP' cannot be imported: No module named",
    ),
    "owned optimizer that is none": (
        GROUPS.replace('"DMuon"', '"Owned:torch.nn.Linear"'),
        "run.toml:7: in [optimizer.param_groups.0]: 'torch.nn.Linear' is no subclass of torch.optim.Optimizer",
    ),
    "owned optimizer that computes the loss itself": (
        GROUPS.replace('"DMuon"', '"Owned:torch.optim.LBFGS"'),
        "run.toml:7: in [optimizer.param_groups.0]: 'torch.optim.LBFGS' cannot be stepped by a trainer: its step needs "
        "closure",
    ),
    "argument that an owned optimizer lacks": (
        GROUPS.replace('"DMuon"', '"Owned:torch.optim.Muon"').replace("momentum =", "momentun ="),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: torch.optim.Muon has no argument 'momentun'. Did "
        "you mean 'momentum'",
    ),
    "two owned optimizers": (
        "[[optimizer.param_groups]]\npattern = 'wo'\noptimizer_name = \"Owned:torch.optim.AdamW\"\n" + GROUPS,
        "run.toml:10: in [optimizer.param_groups.1]: one optimizer updates all owned matrices: 'Owned:torch.opt",
    ),
    "groups that differ in what is one for all": (
        "[[optimizer.param_groups]]\npattern = 'wo'\noptimizer_name = \"DMuon\"\n"
        + "optimizer_kwargs.batch_bytes = 0\n"
        + GROUPS,
        "run.toml:12: in [optimizer.param_groups.1]: batch_bytes is one for all groups of Muon",
    ),
    "unknown optimizer argument": (
        GROUPS.replace("momentum", "momentun"),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: DMuon has no argument 'momentun'. Did you mean "
        "'momentum'",
    ),
    "optimizer argument of a wrong type": (
        GROUPS.replace("lr = 3e-4, betas", 'lr = "3e-4", betas'),
        "run.toml:13: in [optimizer.param_groups.1.optimizer_kwargs]: lr = '3e-4': expected a number, found a string",
    ),
    "optimizer argument out of range": (
        re.sub(r"optimizer_kwargs = \{ lr = 3e-4, weight.*", ARGUMENTS, GROUPS, count=1),
        "run.toml:9: in [optimizer.param_groups.0.optimizer_kwargs]: DMuon: ",
    ),
    "heads of a group without any": (
        GROUPS.replace("(attention|feed_forward)", "feed_forward").replace("momentum = 0.95", "per_head = true"),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: per_head = true: none of the 18 parameters",
    ),
    "heads of a wrong type": (
        GROUPS.replace("momentum = 0.95", 'per_head = "yes"'),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: per_head = 'yes': expected true or false",
    ),
    "float16 on CPU": (
        GROUPS.replace("momentum = 0.95", 'ns_dtype = "float16"'),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: DMuon: Newton-Schulz dtype float16 is for CUDA",
    ),
    "kernels for CUDA on CPU": (
        GROUPS.replace("momentum = 0.95", 'ns_kernels = "quack"'),
        'run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: DMuon: ns_kernels = "quack" needs a CUDA device',
    ),
    "a table that does not converge": (
        GROUPS.replace("momentum = 0.95", "ns_coefficients = [[3.0, -3.0, 3.0]]"),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: DMuon: Newton-Schulz coefficients ((3.0, ",
    ),
    "a learning-rate function that is not there": (
        GROUPS.replace('"match_rms_adamw"', '"math:no_such"'),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: DMuon: adjust_lr_fn 'math:no_such' cannot be",
    ),
    "betas of a wrong length": (
        GROUPS.replace("[0.9, 0.95]", "[0.9]"),
        "run.toml:13: in [optimizer.param_groups.1.optimizer_kwargs]: betas = (0.9,): expected an array of 2 numbers",
    ),
    "one row of coefficients that are not numbers": (
        GROUPS.replace("momentum = 0.95", "ns_coefficients = [1.5, true, 0.0]"),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: DMuon: Newton-Schulz coefficients must be one of",
    ),
    "coefficients that are not finite": (
        GROUPS.replace("momentum = 0.95", "ns_coefficients = [nan, 1.0, 1.0]"),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs.ns_coefficients]: ns_coefficients = nan:",
    ),
    "a learning rate that is not finite": (
        GROUPS.replace("lr = 3e-4, betas", "lr = inf, betas"),
        "run.toml:13: in [optimizer.param_groups.1.optimizer_kwargs]: lr = inf: expected a finite number",
    ),
    "a learning-rate function of one number": (
        GROUPS.replace('"match_rms_adamw"', '"math:sqrt"'),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: DMuon: adjust_lr_fn 'math:sqrt' failed for",
    ),
    "DMuon's argument under DistMuon": (
        GROUPS.replace('"DMuon"', '"DistMuon"').replace("momentum =", 'momentum_form = "ema", momentum ='),
        "run.toml:8: in [optimizer.param_groups.0.optimizer_kwargs]: DistMuon has no argument 'momentum_form'. Did",
    ),
    "no group": (
        "[optimizer]\nparam_groups = []\n",
        "run.toml:5: in [optimizer]: param_groups = []: expected at",
    ),
    "clipping by no number": (
        "[training]\nmax_norm = nan\n",
        "run.toml:5: in [training]: max_norm = nan: expected a",
    ),
    "clipping below zero": (
        "[training]\nmax_norm = -1\n",
        "run.toml:5: in [training]: max_norm = -1.0: expected a",
    ),
    "no step": ("[training]\nsteps = 0\n", "run.toml:5: in [training]: steps = 0: expected at least 1"),
    "no sequence": ("[training]\nseq_len = -5\n", "run.toml:5: in [training]: seq_len = -5: expected at least 1"),
    "no batch": ("[training]\nlocal_batch_size = 0\n", "run.toml:5: in [training]: local_batch_size = 0: expected at"),
    "no global batch": (
        "[training]\nglobal_batch_size = -7\n",
        "run.toml:5: in [training]: global_batch_size = -7: e",
    ),
    "no time to begin": ("[comm]\ninit_timeout_seconds = 0\n", "run.toml:5: in [comm]: init_timeout_seconds = 0: expe"),
    "no time to train": ("[comm]\ntrain_timeout_seconds = -1\n", "run.toml:5: in [comm]: train_timeout_seconds = -1:"),
    "QK-clip at infinity": ("[dmuon]\nqk_clip = inf\n", "run.toml:5: in [dmuon]: qk_clip = inf: must be a finite"),
    "QK-clip at no number": ("[dmuon]\nqk_clip = nan\n", "run.toml:5: in [dmuon]: qk_clip = nan: must be a finite"),
    "tensor parallelism": (
        GROUPS + "[parallelism]\ntensor_parallel_degree = 2\n",
        "run.toml:15: in [parallelism]: tensor_parallel_degree = 2: DMuon does not support tensor parallelism yet",
    ),
    "bf16 masters": (
        GROUPS + '[training]\ndtype = "bfloat16"\n',
        "run.toml:15: in [training]: dtype = 'bfloat16': DMuon",
    ),
}


def test_rules_of_a_file_and_matrices_by_head(write):
    """Per-step tables, a guard eps, a function by its path; each head of a projection its own matrix."""
    rule = (
        'adjust_lr_fn = "math:hypot", eps = 1e-30, per_head = true, '
        "ns_coefficients = [[3.4445, -4.775, 2.0315], [1.5, -0.5, 0]], ns_steps = 4"
    )
    config = toml_config.load(write(GROUPS.replace('adjust_lr_fn = "match_rms_adamw"', rule))).config
    checks.check_run(config, None)
    settings = settings_of(owned_optimizer(config, [torch.zeros(1, 1)]).param_groups[0])
    assert settings.table == ((3.4445, -4.775, 2.0315), *[(1.5, -0.5, 0.0)] * 3) and settings.eps == 1e-30
    model = checks.meta_model(config)
    (heads,) = {m.head_dim for m in model.modules() if hasattr(m, "wqkv")}
    by_kind = {spec.name.split(".", 2)[2]: spec for spec in dmuon_specs(config, model)}
    for name, spec in by_kind.items():
        projection = "qkv" in name
        assert spec.layout.rows == ((heads,) * (spec.shape[0] // heads) if projection else ()), name
    assert any("qkv" in name for name in by_kind)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_that_says_where(write, case):
    text, expected = REFUSED[case]
    above = text if not text.lstrip().startswith("[") else ""  # keys of the whole file come before the first table
    file = write("" if above else text, job=above + JOB)
    message = _error(file)
    assert message.startswith(expected)
    assert "\n" not in message


# What torch annotates as a number and gives an integer for a default, and an argument that is an integer.
NUMBERS = {
    "Adam": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "ASGD": {"weight_decay": 0.1, "t0": 10},
    "Rprop": {"step_sizes": [1e-6, 25.5]},
    "Adafactor": {"eps": (None, 1e-3)},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_arguments_of_torchs_optimizers(name):
    checks.check_optimizer_kwargs(f"Owned:torch.optim.{name}", NUMBERS[name], "x")
    with pytest.raises(ConfigError, match="lr = 'x': expected a number"):
        checks.check_optimizer_kwargs(f"Owned:torch.optim.{name}", {"lr": "x"}, "x")


def test_an_annotated_integer_is_one():
    with pytest.raises(ConfigError, match=r"ns_steps = 1\.5: expected an integer"):
        checks.check_optimizer_kwargs("Owned:torch.optim.Muon", {"ns_steps": 1.5}, "x")


def test_dist_muons_own_arguments_pass():
    checks.check_optimizer_kwargs("DistMuon", {"lr": 1e-3, "foreach": False, "adjust_lr_fn": "match_rms_adamw"}, "x")


def test_a_dmuon_table_that_no_group_follows_is_told_once_it_says_something(write):
    plain = toml_config.load(write("[dmuon]\nclip = 'per_matrix'\n")).config
    assert "no effect" in checks.without_effect(plain)
    assert not checks.without_effect(toml_config.load(write("[dmuon]\nclip = 'per_matrix'\n" + GROUPS)).config)
    assert not checks.without_effect(toml_config.load(write("")).config)


def test_a_byte_order_mark_is_no_text(write, tmp_path):
    file = write("[training]\nsteps = 7\n")
    (tmp_path / file).write_bytes(b"\xef\xbb\xbf" + (tmp_path / file).read_bytes())
    assert toml_config.load(file).config.training.steps == 7


@pytest.mark.parametrize(
    ("tables", "world", "expected"),
    [
        (
            "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 2",
            8,
            "run.toml:6: in [parallelism]: the mesh",
        ),
        ("data_parallel_replicate_degree = 3", 4, "run.toml:5: in [parallelism]: the mesh of data_parallel_replicate_"),
        (
            "data_parallel_replicate_degree = 0",
            4,
            "run.toml:5: in [parallelism]: data_parallel_replicate_degree = 0: expected at least 1",
        ),
        ("data_parallel_shard_degree = 0", 4, "run.toml:5: in [parallelism]: data_parallel_shard_degree = 0: expected"),
    ],
)
def test_a_mesh_that_does_not_fit_the_world(write, tables, world, expected):
    assert _error(write(f"[parallelism]\n{tables}\n"), world=world).startswith(expected)


def test_a_mesh_that_fits(write):
    tables = "[parallelism]\ndata_parallel_replicate_degree = 2\n"
    checks.check_run(toml_config.load(write(tables)).config, 8)


def test_a_global_batch_that_does_not_divide(write):
    message = _error(write("[training]\nlocal_batch_size = 2\nglobal_batch_size = 6\n"), world=4)
    assert message.startswith("run.toml:6: in [training]: global_batch_size = 6: must be a multiple of")


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("", "run.toml:1: no [job] table"),
        ('[job]\nmodule = "llama3"\n', "run.toml:1: in [job]: key 'config' is missing"),
        (
            '[job]\nmodule = "llama3"\nconfi = "x"\n',
            "run.toml:3: in [job]: unknown key 'confi'. Did you mean 'config'?",
        ),
        (
            '[job]\nmodule = "llama3"\nconfig = 3\n',
            "run.toml:3: in [job]: config = 3: expected a string, found an integer",
        ),
        ('[job]\nmodule = "lama3"\nconfig = "x"\n', "run.toml:2: in [job]: module 'lama3' has no config registry"),
        (
            '[job]\nmodule = "llama3"\nconfig = "llama3_debug_model"\n',
            "run.toml:3: in [job]: module 'llama3' has no config 'llama3_debug_model'. Did you mean",
        ),
        (JOB + 'dump_folder = "x"\n', "run.toml:4: in [job]: unknown key 'dump_folder'. It is a key of the whole file"),
    ],
)
def test_the_job_table(write, job, expected):
    assert _error(write("", job=job)).startswith(expected)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "--config is missing"),
        (["--config"], "--config needs a value"),
        (["--config", "absent.toml"], "absent.toml: cannot be read: No such file"),
        (["--config", "llama3_debugmodel"], "--module is missing"),
        (["--module", "llama3", "--config", "x.toml"], "--module llama3 does not go with a TOML file"),
        (
            ["--module", "llama3", "--config", "nothing"],
            "module 'llama3' has no config 'nothing'. Valid: llama3_405b, ",
        ),
    ],
)
def test_the_command_line(args, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as info:
        toml_config.parse(args)
    assert str(info.value).startswith(expected)


def test_a_bad_value_from_the_command_line_is_said_to_be_from_there(write):
    file = write("[training]\nlocal_batch_size = 2\n")
    message = _error(file, "--training.global_batch_size", "6", world=4)
    assert message.startswith("command line: --training.global_batch_size: global_batch_size = 6")


@pytest.fixture
def one_rank(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_flags_that_tyro_refuses_end_with_code_2_and_one_line(write, capsys, one_rank):
    cases = {
        "prefetch -1": "Error parsing dmuon: prefetch = -1: must be at least 0.",
        "prefetsh 1": "Unrecognized options: --dmuon.prefetsh, 1. Did you mean --dmuon.prefetch?",
        "routing ring": "invalid choice 'ring' for argument '--dmuon.routing'. Expected one of ('two_level', 'flat').",
    }
    for flags, message in cases.items():
        assert _error(write(""), *f"--dmuon.{flags}".split()) == f"command line: {message}"
    assert train.main(["--config", write(""), "--dmuon.prefetch", "-1"]) == 2
    assert capsys.readouterr().err == f"error: command line: {cases['prefetch -1']}\n"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"RANK": "9", "WORLD_SIZE": "4"}, "RANK = 9, WORLD_SIZE = 4 in the environment: expected a rank below"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK = 'x' in the environment"),
        ({"RANK": "x"}, "RANK = 'x' in the environment"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE = '' in the environment: expected a number of at least 1"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE = 'x' in the environment"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE = '0' in the environment: expected a number of at least 1"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE = 'x' in the environment"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE = 2, WORLD_SIZE = 1 in the environment: expected no more on a"),
    ],
)
def test_an_environment_that_is_no_launchers(changes, expected, one_rank, monkeypatch, capsys):
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert train.main(["--config", "none.toml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {expected}") and said.count("\n") == 1


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(write, tmp_path, one_rank, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(places, "check_tokenizer", lambda config: None)
    out = tmp_path / "out"
    assert train.main(["--config", write('[dataloader]\ndataset = "c4"\n'), "--dump_folder", str(out)]) == 2
    said = capsys.readouterr().err
    assert "dump_folder cannot be used: [Errno 28] No space left on device" in said and said.count("\n") == 1
    assert not list(out.iterdir())


def test_another_number_of_ranks_is_told_what_it_can_resume():
    from torchtitan_dmuon.titan.trainer import _resharding_told

    with pytest.raises(ConfigError, match=r'exclude_from_loading = \["dataloader"\]'), _resharding_told():
        raise AssertionError("dp_degree is inconsistent ..., dataloader resharding is not supported yet.")
    with pytest.raises(AssertionError, match="^another$"), _resharding_told():
        raise AssertionError("another")


def test_torchrun_is_left_the_message_for_its_report(monkeypatch, tmp_path, one_rank):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert train.main(["--config", "none.toml"]) == 2
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    assert failure.message["message"].startswith("error: none.toml: cannot be read")


def test_node_holders_need_global_ownership():
    assert DMuonConfig(holders="node").holders == "node"
    with pytest.raises(ConfigError, match='holders = "node" needs ownership = "global"') as caught:
        DMuonConfig(holders="node", ownership="replica")
    assert caught.value.path == "holders"


def test_a_bad_file_ends_the_entry_point_with_code_2_before_torchtitan_is_imported(write):
    file = write('[dmuon]\nclip = "matrix"\n')
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    script = (
        "import sys; from torchtitan_dmuon import train; code = train.main(['--config', sys.argv[1]]);"
        "print('torchtitan.trainer' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, file], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        'error: run.toml:5: in [dmuon]: clip = \'matrix\': expected one of "joint", "adamw_only", "per_matrix", found '
        "a string. Did you mean 'per_matrix'?"
    ]
    assert done.stdout.strip() == "False"


# --- random files -------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 3),
    st.floats(-2, 2),
    st.sampled_from(["none", "full", "float32", "", "x", "2"]),
    st.lists(st.integers(0, 3) | st.text("ab", max_size=2), max_size=3),
    st.dictionaries(st.sampled_from(["type", "lr", "steps", "x"]), st.integers(0, 3) | st.just("none"), max_size=2),
)
TABLES = ["training", "parallelism", "dmuon", "optimizer", "activation_checkpoint", "checkpoint", "loss", "dataloader"]


def _key_of(table):
    fields = {
        "dmuon": [f.name for f in dataclasses.fields(DMuonConfig)],
        "optimizer": ["param_groups", "implementation"],
    }
    common = [
        "steps",
        "seq_len",
        "type",
        "dtype",
        "interval",
        "data_parallel_shard_degree",
        "num_chunks",
        "stepz",
        "a.b",
    ]
    return st.sampled_from(fields.get(table, []) + common)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_tables_load_or_are_refused_with_file_line_and_key(tmp_path, data):
    table = data.draw(st.sampled_from(TABLES))
    key, value = data.draw(_key_of(table)), data.draw(VALUES)
    file = tmp_path / "random.toml"
    body = tomli_w.dumps({"job": {"module": "llama3", "config": "llama3_debugmodel"}, table: {key: value}})
    file.write_text(body)
    try:
        config = toml_config.load(str(file)).config
    except ConfigError as error:
        message = str(error)
        assert message.startswith(f"{file}:") and "\n" not in message
        line = int(message[len(str(file)) + 1 :].partition(":")[0])
        if key in message.partition(": ")[2]:  # the error is about the key: the line shows it, or begins its table
            shown = body.splitlines()[line - 1]
            assert key in shown or table in shown or any(key in part for part in message.split("'"))
        assert table in message
    else:
        kept = getattr(config, table)
        assert kept is None or value == "none" or key == "type" or hasattr(kept, key)


@settings(max_examples=150, deadline=None)
@given(
    keys=st.lists(st.from_regex(r"[a-z]{1,5}", fullmatch=True), min_size=1, max_size=5, unique=True),
    value=st.recursive(
        st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz.", min_size=1, max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    multiline=st.booleans(),
)
def test_line_numbers_of_random_documents(keys, value, multiline):
    document = {"first": {k: value for k in keys}, "groups": [{k: value} for k in keys]}
    text = tomli_w.dumps(document, multiline_strings=multiline)
    assert tomli.loads(text) is not None
    lines, shown = key_lines(text), text.split("\n")
    for key in keys:
        line = lines["first", key]
        assert key in shown[line - 1]
    for index, key in enumerate(keys):
        assert key in shown[lines["groups", str(index), key] - 1]


AWKWARD = '''# comment with = and [brackets]
a = 1
"quo ted" = """
b = 2
"""
[t.u]  # trailing
c.d = [ # comment
  "]", 1,
  { e = 1, f = [2] },
]
[[g]]
h = """x""""
i = 1
[[g]]
h.j = "x" # ]
'''


def test_line_numbers_of_awkward_toml():
    assert tomli.loads(AWKWARD)
    lines = key_lines(AWKWARD)
    expected = {
        ("a",): 2,
        ("quo ted",): 3,
        ("t", "u"): 6,
        ("t", "u", "c", "d"): 7,
        ("t", "u", "c", "d", "2", "e"): 9,
        ("g", "0", "h"): 12,
        ("g", "0", "i"): 13,
        ("g", "1", "h", "j"): 15,
    }
    assert {path: lines.get(path) for path in expected} == expected
    assert ("b",) not in lines


# --- what is saved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tables",
    [
        "",
        GROUPS,
        GROUPS.replace("lr = 3e-4, weight", "ns_coefficients = [[1.5, -0.5, 0.0]], lr = 3e-4, weight"),
        '[activation_checkpoint]\ntype = "none"\n[override]\nimports = ["a.b", ["c.d", { x = 1 }]]\n',
        '[activation_checkpoint]\ntype = "full"\n[loss]\ntype = "CrossEntropyLoss"\nglobal_vocab_size = 2048\n',
        '[dmuon]\nrouting = "flat"\ndefer_reduce = true\n[parallelism]\nmodule_fqns_per_model_part = [["a"], ["c"]]\n',
        '[dataloader]\ntype = "InterleavedHuggingFaceTextDataLoader"\n[[dataloader.sources]]\ndataset = "c4_test"\n',
    ],
)
def test_the_saved_file_gives_the_same_config(write, tmp_path, tables):
    run = toml_config.load(write(tables))
    document, left_out = toml_config.document(run)
    (path,) = toml_config.save(document, left_out, str(tmp_path / "dump"), ["a change"])
    again = toml_config.load(path)
    assert (again.source.module, again.source.config) == ("llama3", "llama3_debugmodel")
    for field in dataclasses.fields(run.config):
        if field.name != "model_spec":
            assert getattr(again.config, field.name) == getattr(run.config, field.name), field.name
            assert type(getattr(again.config, field.name)) is type(getattr(run.config, field.name)), field.name
    assert left_out == []
    assert toml_config.document(again) == (document, left_out)


def test_two_runs_may_save_in_one_folder(tmp_path, monkeypatch):
    rename = os.replace

    def meanwhile(source, target):  # another run saves between this one's writing and its renaming
        monkeypatch.setattr(os, "replace", rename)
        toml_config.save({"steps": 2}, [], str(tmp_path))
        rename(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    (path,) = toml_config.save({"steps": 1}, [], str(tmp_path))
    assert tomli.loads(pathlib.Path(path).read_text()) == {"steps": 1} and os.listdir(tmp_path) == ["config.toml"]


def test_flags_are_in_the_saved_file(write, tmp_path):
    run = toml_config.parse(["--config", write(""), "--training.steps", "9"])
    (path,) = toml_config.save(*toml_config.document(run), str(tmp_path / "dump"))
    assert toml_config.load(str(path)).config.training.steps == 9


# --- which group takes what ---------------------------------------------------------------------------------------

SHAPES = {"layers.0._checkpoint_wrapped_module.w.weight": (4, 4), "layers.0.norm.weight": (4,), "head.weight": (8, 4)}


def test_the_first_match_wins_and_vectors_fall_through_by_canonical_name():
    groups = [(r"^layers\.0\.(w|norm)\.", "DMuon"), ("norm", "AdamW"), (".*", "AdamW")]
    assignment = assign_parameters(SHAPES, groups)
    assert assignment.groups == (("layers.0.w.weight",), ("layers.0.norm.weight",), ("head.weight",))
    assert assignment.fell_through == (("layers.0.norm.weight", 0),)


def test_vectors_stay_with_an_optimizer_that_takes_them():
    assert assign_parameters(SHAPES, [(".*", "AdamW")]).fell_through == ()
