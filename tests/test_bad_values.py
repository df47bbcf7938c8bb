"""Every key with values of every bad kind: refused in one line that names it, before anything is made; and what a run
reads and writes is looked at before it starts."""

from __future__ import annotations

import collections
import copy
import dataclasses
import os
import pathlib
import re

import pytest

from tests import titan_runs
from torchtitan_dmuon import train
from torchtitan_dmuon.titan import checks, flags, places, ranges, toml_config
from torchtitan_dmuon.titan.config import ConfigError, NonFiniteGradients
from torchtitan_dmuon.titan.tables import Merger


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return titan_runs.make_folder(tmp_path_factory.mktemp("values"))


@pytest.fixture(scope="module")
def start(folder):
    """A run that passes all checks."""
    run = titan_runs.parse(["--config", str(folder / "DMuon.toml")])
    check(run.config)
    return run.config


def check(config) -> None:
    """What the entry point does before it makes the dump folder; the model is the same in every case."""
    checks.check_mesh(config, 1)
    checks.check_dmuon(config)
    checks.check_optimizers(config)
    places.check(config, lambda key: True)
    places.check_tokenizer(config)


def merged(config, key: str, value):
    """``config`` with one dotted key as a file would set it."""
    for part in reversed(key.split(".")):
        value = {part: value}
    config = copy.deepcopy(config)
    return Merger().table((), type(config), value, config)


BAD = {
    "not a number": (float("nan"), float("inf"), -float("inf"), [float("nan")]),
    "huge": (10**30, 2**31, "x" * 5000, 10**5000),
    "negative": (-1, -0.5),
    "empty": ("", " ", [], {}, 0),
    "no text": ("\udcff", "a\0b"),
    "another type": (True, 1.5, "nope", ["nope"], {"nope": 1}),
    "a path elsewhere": ("..", "~/x", "/proc/nope"),
}
# Of the kinds, what a key may have all the same, or nobody will look at as long as its section is off.
HARMLESS = r"""
    parallelism\.(pipeline|context)_parallel_(schedule(_csv)?|load_balancer|ptrr_mask_key) .*
    compile\.backend .* | validator\.dataloader\.dataset(_path)? .*
    (profiler|metrics|checkpoint)\.[a-z_]*folder '(nope|/proc/nope)' | comm\.save_traces_f[a-z_]+ '(nope|\.\.|\ ?)'
    (dump_folder|debug\.save_config_file) '(nope|\.\.|\.\./x)' | dataloader\.dataset_path '\.\.'
    training\.max_norm (inf|10+|2147483648|1\.5) | debug\.seed (10+|2147483648|0)
    dmuon\.qk_clip (10+|2147483648|1\.5|0)
    dmuon\.[a-z_]+ 0 | dmuon\.cost_file '' | (training|validator).*(batch_size|steps) -1
    checkpoint\.(load_step -1|keep_latest_k\ 0) | parallelism\.data_parallel_shard_degree -1
    lr_scheduler\.[a-z_]+ 0 | profiler\.profiler_[a-z_]+ 0 | .*num_workers 0 | comm\.trace_buf_size 0
    parallelism\.pipeline_parallel_[a-z]+_stage_less_layers 0 | parallelism\.module_fqns_per_model_part \[\]
    .*\.param_groups \[\] | .*(sources|imports|components|exclude_from_loading|fqns) \[\]
    .* (\{\}|True)
"""


def test_every_key_with_every_bad_kind(start) -> None:
    allowed = re.compile("|".join(line.strip().replace(" | ", "|") for line in HARMLESS.strip().splitlines()))
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for key, _ in ranges.leaves(start):
        if any(part.isdecimal() for part in key.split(".")):
            continue
        for value in (value for values in BAD.values() for value in values):
            case = f"{key} {repr(value)[:40] if not isinstance(value, int) or value < 10**40 else 'an integer'}"
            try:
                check(merged(start, key, value))
            except ConfigError as error:
                counts["refused"] += 1
                named = key.rpartition(".")[2] in str(error) or error.path.startswith(key)
                if "\n" in str(error) or len(str(error)) > 600 or not (named or key.startswith(error.path)):
                    wrong.append(f"{case}: {error} [{error.path}]")
            except Exception as error:
                wrong.append(f"{case}: {type(error).__name__}: {error}")
            else:
                counts["accepted"] += 1
                if not allowed.fullmatch(case):
                    wrong.append(f"{case}: accepted")
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] > 1900 and counts["accepted"] < 220, counts


def test_every_number_of_torchtitan_has_its_range(start) -> None:
    """A number that a later TorchTitan adds is decided on here, not by chance."""
    from torchtitan_dmuon.titan.tables import choices, field_types

    def numbers(config, path=()):
        for field in dataclasses.fields(config):
            value, key = getattr(config, field.name), (*path, field.name)
            if dataclasses.is_dataclass(value) and field.name not in ("model_spec", "dmuon"):
                yield from numbers(value, key)
            elif {int, float} & set(choices(field_types(type(config))[field.name]).values()):
                yield ".".join(key)

    lacking = [
        key for key in numbers(start) if key not in ranges.RANGES and key.rpartition(".")[2] not in ranges.RANGES
    ]
    assert lacking == []


# --- the common slips -----------------------------------------------------------------------------------------------

SLIPS = {
    "no tokenizer": (
        "hf_assets_path",
        "/nope",
        "expected a folder with a tokenizer (tokenizer.json); there is no such",
    ),
    "a tokenizer that is a file": ("hf_assets_path", "FOLDER/tokenizer/tokenizer.json", "it is a file"),
    "an empty tokenizer folder": ("hf_assets_path", "FOLDER/empty", "it cannot be read"),
    "a data set misspelled": ("dataloader.dataset", "c4_tset", "no such data set. Did you mean 'c4_test'"),
    "a data set that is not there": ("dataloader.dataset_path", "FOLDER/dat", "there is no FOLDER/dat"),
    "workers": ("dataloader.num_workers", -1, "num_workers = -1: expected at least 0"),
    "chunks": ("loss.num_chunks", 3, "seq_len = 32: must be a multiple of loss.num_chunks = 3"),
    "no chunks": ("loss.num_chunks", 0, "num_chunks = 0: expected at least 1"),
    "fewer chunks than none": ("loss.num_chunks", -1, "num_chunks = -1: expected at least 1"),
    "decay": ("lr_scheduler.decay_ratio", float("nan"), "decay_ratio = nan: expected a number, not nan"),
    "total": ("lr_scheduler.total_steps", 0, "total_steps = 0: expected at least 1"),
    "warm-up": ("lr_scheduler.warmup_steps", -1, "warmup_steps = -1: expected at least 0"),
    "timeout": ("comm.train_timeout_seconds", 10**30, "expected at most 2,147,483,647"),
    "flight recorder": ("comm.trace_buf_size", 10**30, "expected at most 10,000,000"),
    "validation": ("validator.freq", 0, "freq = 0: expected at least 1"),
    "what is left out": (
        "checkpoint.exclude_from_loading",
        ["dataloder"],
        "exclude_from_loading = 'dataloder': expected",
    ),
    "home": ("dump_folder", "~/runs", "'~' is no home folder here; write /"),
    "out of the folder": ("checkpoint.folder", "../../x", "leads out of dump_folder"),
    "a file in full": ("debug.save_config_file", "/elsewhere/x.json", "expected a file in dump_folder"),
    "a costs file": ("dmuon.cost_file", "/nope.json", "cost_file = '/nope.json'"),
    "a step": (
        "checkpoint",
        {"enable": True, "load_step": 7},
        "load_step = 7: no checkpoint of this step in FOLDER/DMuon",
    ),
    "a negative step": ("checkpoint", {"enable": True, "load_step": -2}, "load_step = -2: expected at least 0, or -1"),
    "a start": (
        "checkpoint",
        {"enable": True, "initial_load_path": "/nope"},
        "'/nope': expected a checkpoint to start",
    ),
    "a start in HF's form": (
        "checkpoint",
        {"enable": True, "initial_load_in_hf": True},
        "a folder with model.safetensors",
    ),
    "a schedule too short": ("lr_scheduler.total_steps", 3, "total_steps = 3: must be at least training.steps = 10"),
    "selective debugging": ("activation_checkpoint", {"type": "selective", "debug": True}, "not with selective"),
    "a step, no checkpoints": ("checkpoint.load_step", 7, "load_step = 7: has no effect, because checkpoint.enable is"),
    "profiler": (
        "profiler",
        {"enable_profiling": True, "profile_freq": 3},
        "must be at least profiler_warmup + profiler_",
    ),
    "events": (
        "metrics",
        {"enable_tensorboard": True, "save_tb_folder": "FOLDER/a"},
        "cannot be written: FOLDER/a is a",
    ),
    "traces": ("comm.save_traces_folder", "FOLDER/a", "cannot be written: FOLDER/a is a file"),
    "checkpoints": (
        "checkpoint",
        {"enable": True, "folder": "FOLDER/loop"},
        "cannot be written: FOLDER/loop: Too many",
    ),
    "pipeline": ("parallelism.pipeline_parallel_degree", 2, "DMuon does not support pipeline parallelism yet"),
    "backend": (
        "compile",
        {"enable": True, "backend": "inductr"},
        "no backend of torch.compile. Did you mean 'inductor'",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_common_slips(start, folder, slip) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "a").touch()
    if not (folder / "loop").is_symlink():
        (folder / "loop").symlink_to("loop")
    key, value, expected = SLIPS[slip]
    here = lambda x: x.replace("FOLDER", str(folder)) if isinstance(x, str) else x  # noqa: E731
    value = {k: here(v) for k, v in value.items()} if isinstance(value, dict) else here(value)
    with pytest.raises(ConfigError) as info:
        check(merged(start, key, value))
    assert here(expected) in str(info.value) and "\n" not in str(info.value)
    assert info.value.path


def test_validation_from_the_hub_beside_local_training_is_on_purpose_or_not_at_all(start) -> None:
    config = merged(
        start, "validator", {"enable": True, "dataloader": {"dataset": "c4_validation", "dataset_path": "none"}}
    )
    places.check(config, lambda key: True)
    with pytest.raises(ConfigError, match="validation would read allenai/c4 from the Hub, while training reads local"):
        places.check(config, lambda key: False)


def test_the_whole_validation_set_needs_one_rank(start) -> None:
    config = merged(start, "validator", {"enable": True, "steps": -1})
    checks.check_mesh(config, 1)
    with pytest.raises(ConfigError, match="unequal shares of the set"):
        checks.check_mesh(config, 2)


def test_a_tokenizer_must_fit_the_embedding(start) -> None:
    config = copy.deepcopy(start)
    config.model_spec = copy.copy(config.model_spec)
    model = copy.copy(config.model_spec.model)
    config.model_spec = dataclasses.replace(config.model_spec, model=model)
    model.vocab_size = 100
    with pytest.raises(ConfigError, match="its tokenizer has 258 tokens, but the model's embedding 100 rows"):
        places.check_tokenizer(config)


def test_what_only_a_step_refuses() -> None:
    with pytest.raises(ConfigError, match="capturable"):
        checks.check_optimizer_kwargs("AdamW", {"capturable": True}, "x")


# --- the entry point ------------------------------------------------------------------------------------------------


def test_a_refused_run_makes_nothing(folder, tmp_path, monkeypatch, capsys) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    argv = ["--config", str(folder / "AdamW.toml"), "--dump_folder", str(tmp_path / "out")]
    for wrong in (["--hf_assets_path", "/nope"], ["--training.steps", "0"], ["--checkpoint.load_step", "3"]):
        assert train.main([*argv, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert os.listdir(tmp_path) == []


def test_what_only_the_running_job_finds_is_one_line_too(folder, tmp_path, monkeypatch, capsys) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)

    def late(config, lines, tables):
        raise ConfigError("the checkpoint was written otherwise", "checkpoint.folder")

    monkeypatch.setattr(train, "train", late)
    file = str(folder / "AdamW.toml")
    assert train.main(["--config", file, "--dump_folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {file}:1: in [checkpoint]: the checkpoint was written otherwise\n"

    def diverged(config, lines, tables):
        raise NonFiniteGradients("three steps in a row")

    monkeypatch.setattr(train, "train", diverged)
    assert train.main(["--config", file, "--dump_folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: three steps in a row\n"


# --- flags ----------------------------------------------------------------------------------------------------------


def test_flags_take_values_as_files_do(folder) -> None:
    file = str(folder / "DMuon.toml")
    cases = {
        "--dmuon.defer_reduce true": ("dmuon.defer_reduce", True),
        "--dmuon.defer_reduce=False": ("dmuon.defer_reduce", False),
        "--dmuon.defer_reduce auto": ("dmuon.defer_reduce", "auto"),
        "--dmuon.riders false": ("dmuon.riders", False),
        "--checkpoint.enable true": ("checkpoint.enable", True),
        "--checkpoint.enable=true": ("checkpoint.enable", True),
        "--checkpoint.enable": ("checkpoint.enable", True),
        "--checkpoint.no-enable": ("checkpoint.enable", False),
        "--metrics.disable-color-printing false": ("metrics.disable_color_printing", False),
        '--checkpoint.exclude_from_loading ["dataloader","optimizer"]': (
            "checkpoint.exclude_from_loading",
            ["dataloader", "optimizer"],
        ),
        "--checkpoint.exclude_from_loading dataloader": ("checkpoint.exclude_from_loading", ["dataloader"]),
        "--lr_scheduler.decay_ratio 0.5": ("lr_scheduler.decay_ratio", 0.5),
    }
    base = toml_config.load(file).config
    for text, (key, expected) in cases.items():
        config = flags.apply(base, text.split())
        for part in key.split("."):
            config = getattr(config, part)
        assert config == expected and type(config) is type(expected), text


def test_every_boolean_flag_takes_true_and_false(start) -> None:
    keys = [k for k, v in ranges.leaves(start) if isinstance(v, bool) and not any(p.isdecimal() for p in k.split("."))]
    assert len(keys) > 25
    for key in keys:
        table, _, name = key.rpartition(".")
        for value in ("true", "True", "false", "FALSE"):
            words = flags.as_tyro(start, [f"--{key}", value, "--training.steps", "3"])
            plain = key != "dmuon.defer_reduce"
            yes, no = (
                ([f"--{key}"], [f"--{table}.no-{name}"]) if plain else ([f"--{key}", "True"], [f"--{key}", "False"])
            )
            assert words == [*(yes if value.lower() == "true" else no), "--training.steps", "3"]


def test_an_old_flag_is_told_its_new_name(folder) -> None:
    with pytest.raises(ConfigError, match=r"Unrecognized options: --training\.compile.* It is compile\.enable now\."):
        toml_config.parse(["--config", str(folder / "DMuon.toml"), "--training.compile"])
