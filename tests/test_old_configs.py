"""Files of TorchTitan 0.1 and 0.2: told what they are, all at once, and converted. The files are written here; their
keys are those of TorchTitan's own files for the llama3 debug model, 8B, 70B and 405B, and of its job configuration."""

from __future__ import annotations

import pathlib

import pytest
import tomli
import tomli_w

from torchtitan_dmuon import cli
from torchtitan_dmuon.titan import checks, convert, old_names, toml_config
from torchtitan_dmuon.titan.config import ConfigError

QUANTIZED = {"enable_fsdp_float8_all_gather": False, "filter_fqns": ["output"]}


def old_file(version: str, flavor: str) -> dict:
    """What 0.1's and 0.2's files of the llama3 models say, with values of our own."""
    is_debug, is_large = flavor == "debugmodel", flavor in ("70B", "405B")
    first = version == "0.1"
    file = {
        "job": {"dump_folder": "./here", "description": "a run", ("print_args" if first else "print_config"): False},
        "profiling": {"enable_profiling": not is_debug, "save_traces_folder": "traces", "profile_freq": 50},
        "metrics": {"log_freq": 2, "enable_tensorboard": True, "save_tb_folder": "events"},
        "model": {"name": "llama3", "flavor": flavor, **({"converters": ["float8"]} if flavor == "405B" else {})},
        "optimizer": {"name": "AdamW", "lr": 2e-4, "eps": 1e-7},
        "lr_scheduler": {"warmup_steps": 7, "decay_ratio": 0.5, ("lr_min" if first else "min_lr_factor"): 0.1},
        "training": {"local_batch_size": 3, "seq_len": 1024, "max_norm": 0.5, "steps": 70, "dataset": "c4"},
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": -1,
            "tensor_parallel_degree": 8 if is_large else 1,
            "enable_async_tensor_parallel": is_large,
            "pipeline_parallel_degree": 1,
            "context_parallel_degree": 1,
        },
        "checkpoint": {
            ("enable_checkpoint" if first else "enable"): True,
            "folder": "kept",
            "interval": 9,
            ("last_save_model_weights_only" if first else "last_save_model_only"): False,
            "export_dtype": "float32",
            "async_mode": "disabled",
        },
        "activation_checkpoint": {"mode": "full" if is_large else "selective"},
    }
    if not is_large:
        file["activation_checkpoint"]["selective_ac_option"] = "2" if is_debug else "op"
    if first:
        file["model"]["tokenizer_path"] = "./tokenizer.model"
        file["training"]["compile"] = is_large
        file["float8"] = QUANTIZED
    else:
        file["model"]["hf_assets_path"] = "./assets"
        file["compile"] = {"enable": is_large, "components": ["model", "loss"]}
        file["quantize"] = {"linear": {"float8": QUANTIZED}}
        file["validation"] = {"enable": False, "dataset": "c4_validation", "freq": 5, "steps": 10}
    return file


OLD = [(version, flavor) for version in ("0.1", "0.2") for flavor in ("debugmodel", "8B", "70B", "405B")]


@pytest.mark.parametrize(("version", "flavor"), OLD)
def test_an_older_file_is_told_so_with_all_its_keys_at_once(tmp_path, version, flavor) -> None:
    file = tmp_path / "old.toml"
    text = tomli_w.dumps(old_file(version, flavor))
    file.write_text(text)
    with pytest.raises(ConfigError) as info:
        toml_config.load(str(file))
    head, *lines = str(info.value).splitlines()
    expected = [key for key, _ in old_names.leaves(tomli.loads(text)) if old_names.explain(key)]
    assert head.startswith(f"{file}: this file is of an older TorchTitan (0.1 or 0.2), {len(expected)} of its keys")
    assert f"python -m torchtitan_dmuon convert-config {file}" in head
    assert len(lines) == len(expected) > 15
    shown = text.splitlines()
    for line in lines:  # each at its own line, and never with a guess
        number = int(line[len(f"{file}:") :].partition(":")[0])
        assert line.split("unknown key '")[1].split("'")[0] in shown[number - 1]
        assert "Did you mean" not in line


@pytest.mark.parametrize(("version", "flavor"), OLD)
def test_a_converted_file_says_the_same(tmp_path, version, flavor) -> None:
    old = old_file(version, flavor)
    file = tmp_path / "new.toml"
    file.write_text(convert.convert(tomli_w.dumps(old), "old.toml"))
    config = toml_config.load(str(file)).config
    assignment = checks.check_run(config, None)
    assert assignment is not None and len(assignment.groups) == 1
    assert config.model_spec.name == "llama3" and config.model_spec.flavor == flavor
    assert config.dump_folder == "./here" and config.checkpoint.enable and config.checkpoint.folder == "kept"
    assert (config.training.local_batch_size, config.training.seq_len, config.training.steps) == (3, 1024, 70)
    assert config.dataloader.dataset == "c4" and config.lr_scheduler.min_lr_factor == 0.1
    assert config.profiler.profile_freq == 50 and config.metrics.save_tb_folder == "events"
    assert config.parallelism.tensor_parallel_degree == old["parallelism"]["tensor_parallel_degree"]
    assert config.compile.enable is config.compile.enable_async_tensor_parallel is (flavor in ("70B", "405B"))
    assert type(config.activation_checkpoint)._owner.__name__ == (
        "FullAC" if flavor in ("70B", "405B") else "SelectiveAC"
    )
    (group,) = config.optimizer.param_groups
    assert (group.pattern, group.optimizer_name) == (".*", "AdamW")
    assert group.optimizer_kwargs == {"lr": 2e-4, "eps": 1e-7, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    comments = [line for line in file.read_text().splitlines() if line.startswith("#   ")]
    lost = {key for key, _ in old_names.leaves(old) if old_names.gone(key) and key not in old_names.RENAMED}
    assert len(comments) == len(lost) and all(any(k.rpartition(".")[2] in c for c in comments) for k in lost)


def test_every_old_key_is_answered() -> None:
    """No old key is one that 0.3 has, and every new name that is told is a key of 0.3."""
    from torchtitan_dmuon.titan import ranges, registry

    config = registry.config_of("llama3", "llama3_debugmodel")
    keys = {key for key, _ in ranges.leaves(config)} | {"checkpoint.exclude_from_loading", "activation_checkpoint.type"}
    old = [*old_names.RENAMED, *old_names.RESHAPED, *(key for key in old_names.GONE if "." in key)]
    assert len(old) > 70
    assert not [key for key in old if key in keys]
    new = {k: to for k, to in old_names.RENAMED.items()}
    assert not [k for k, to in new.items() if not any(key.startswith(to) for key in keys)]
    assert all(old_names.explain(key) for key in old)


def test_what_0_3_refuses_becomes_a_comment() -> None:
    old = old_file("0.2", "debugmodel")
    old["training"] |= {"seed": 5, "mixed_precision_param": "float64", "steps": 0, "unheard_of": 1}
    old["optimizer"] |= {"name": "Adam", "beta1": 0.8}
    text = convert.convert(tomli_w.dumps(old), "old.toml")
    new = tomli.loads(text)
    assert new["debug"]["seed"] == 5 and "steps" not in new["training"]
    assert new["optimizer"]["param_groups"][0]["optimizer_kwargs"]["betas"] == [0.8, 0.95]
    for said in (
        "unheard_of = 1: unknown key",
        'mixed_precision_param = "float64": mixed_precision_param',
        "steps = 0: expected at least 1",
    ):
        assert f"#   [training] {said}" in text, text


def test_the_command_never_overwrites(tmp_path, capsys) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "old.converted.toml"
    old.write_text(tomli_w.dumps(old_file("0.1", "debugmodel")))
    assert cli.main(["convert-config", str(old)]) == 0
    assert "read and checked" in capsys.readouterr().out and new.exists()
    before = new.read_text()
    assert cli.main(["convert-config", str(old)]) == 2
    assert "exists" in capsys.readouterr().err and new.read_text() == before
    assert cli.main(["convert-config", str(new), "--out", str(tmp_path / "x.toml")]) == 2
    assert "nothing to convert" in capsys.readouterr().err
    old.write_text(tomli_w.dumps({"model": {"name": "llama4", "flavor": "17bx16e"}, "training": {"compile": True}}))
    assert cli.main(["convert-config", str(old), "--out", str(tmp_path / "x.toml")]) == 2
    assert "llama4" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old.converted.toml", "old.toml"]


# --- all errors at once ----------------------------------------------------------------------------------------------


def test_everything_wrong_with_a_file_at_once(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\nflavour = "8B"\n[training]\nstepz = 1\nsteps = "x"\n'
        '[dmuon]\nclip = "x"\n[nope]\na = 1\n[parallelism]\nexpert_parallel_degre = 2\n'
    )
    with pytest.raises(ConfigError) as info:
        toml_config.load(str(file))
    found = [line[len(f"{file}:") :] for line in str(info.value).splitlines()]
    assert [int(line.partition(":")[0]) for line in found] == [4, 6, 7, 9, 10, 13]
    assert "Did you mean 'flavor'?" in found[0] and "Did you mean 'steps'?" in found[1]


def test_a_file_of_any_number_of_wrong_keys_is_answered_at_once(tmp_path) -> None:
    """By the work that is done, not by the clock: keys beyond the first few are counted, not compared with others."""
    count = 200_000
    file = tmp_path / "run.toml"
    keys = "".join(f"key_{i} = 1\n" for i in range(count))
    file.write_text(f'[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n[training]\n{keys}')
    with pytest.raises(ConfigError) as info:
        toml_config.load(str(file))
    *lines, last = str(info.value).splitlines()
    assert len(lines) == 40 and last == f"... and {count - 40:,} more keys, not looked at yet"
    assert lines[-1].startswith(f"{file}:44: in [training]: unknown key 'key_39'.")


@pytest.mark.parametrize("text", ["[" * 100_000, "x = " + "[" * 100_000, "a." * 50_000 + "b = 1", "x = " + "9" * 5000])
def test_files_without_end_are_one_line(tmp_path, text) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n[training]\n{text}\n')
    with pytest.raises(ConfigError) as info:
        toml_config.load(str(file))
    assert str(info.value).startswith(f"{file}:") and len(str(info.value).splitlines()) == 1


NAMES = ["", "..x", ".", "a..b", "a b", "x\0y", "../llama3", "llama3/x", "é", "x" * 5000]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["module", "config", "flavor"])
def test_names_in_job_are_names(tmp_path, key, name) -> None:
    job = {"module": "llama3", "config": "llama3_debugmodel", "flavor": "8B"} | {key: name}
    file = pathlib.Path(tmp_path, "run.toml")
    file.write_text(tomli_w.dumps({"job": job, "training": {"steps": 1}}))
    if key == "flavor" and name == "":
        return toml_config.load(str(file))
    with pytest.raises(ConfigError) as info:
        toml_config.load(str(file))
    assert f"in [job]: {key}" in str(info.value) or f"in [job]: module 'llama3' has no {key}" in str(info.value)
    assert "\n" not in str(info.value) and len(str(info.value)) < 700


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_a_flavor_takes_another_size_on_top_of_a_config(tmp_path) -> None:
    file = tmp_path / "run.toml"
    job = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\nflavor = "{}"\n'
    file.write_text(job.format("1B"))
    run = toml_config.load(str(file))
    assert run.config.model_spec.flavor == "1B" and run.config.model_spec.model.vocab_size == 128256
    assert run.config.loss.loss_fn.global_vocab_size == 128256  # the base's is 2,048
    (path,) = toml_config.save(*toml_config.document(run), str(tmp_path / "dump"))
    again = toml_config.load(str(path))
    assert again.config.model_spec.flavor == "1B" and again.source.flavor == "1B"
    checks.check_run(again.config, 1)
    file.write_text(job.format("8b"))
    with pytest.raises(
        ConfigError, match=r"run\.toml:4: in \[job\]: flavor = '8b': no size of this model\. Did you mean"
    ):
        toml_config.load(str(file))
