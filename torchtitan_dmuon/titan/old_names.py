"""What keys of TorchTitan before 0.3 (0.1, 0.2 and the months before 0.1) are called now.

Decides: for each old key that 0.3 does not have, the new key, or what took its place, or that nothing did. Facts only:
`tables.py` names them in errors, `convert.py` acts on them. Keeps: no key that 0.3 still has is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SECTIONS = {"profiling": "profiler", "validation": "validator"}  # renamed as a whole

# Same value under another name.
RENAMED = {
    "job.dump_folder": "dump_folder",
    "job.print_args": "debug.print_config",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "model.hf_assets_path": "hf_assets_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "activation_checkpoint.mode": "activation_checkpoint.type",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "experimental.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    **{
        f"training.{key}": f"parallelism.{key}"
        for key in ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
    },
    **{
        f"experimental.{key}": f"parallelism.{key}"
        for key in (
            "pipeline_parallel_degree",
            "pipeline_parallel_schedule",
            "pipeline_parallel_schedule_csv",
            "context_parallel_degree",
        )
    },
    **{
        f"{old}.dataloader.{key}": f"{new}.{key}"
        for old, new in (("training", "dataloader"), ("validation", "validator.dataloader"))
        for key in ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")
    },
}

# Said in another shape now.
RESHAPED = {
    "model.name": '[job] module, such as module = "llama3"',
    "model.flavor": '[job] config, such as config = "llama3_8b", and [job] flavor for other sizes of that model',
    **{
        f"optimizer.{key}": f"the optimizer_{where} of [[optimizer.param_groups]], such as {example}"
        for key, where, example in (
            ("name", "name", 'pattern = ".*", optimizer_name = "AdamW"'),
            ("lr", "kwargs", "{ lr = 3e-4 }"),
            ("beta1", "kwargs", "{ betas = [0.9, 0.95] }"),
            ("beta2", "kwargs", "{ betas = [0.9, 0.95] }"),
            ("eps", "kwargs", "{ eps = 1e-8 }"),
            ("weight_decay", "kwargs", "{ weight_decay = 0.1 }"),
        )
    },
    "optimizer.fused": 'optimizer.implementation = "fused"',
}

_QUANTIZED = "quantized layers are chosen by a registry configuration, such as llama3_debugmodel_float8"
# Not there any more. A table's entry holds for all of its keys that have none of their own.
GONE = {
    "job.config_file": "the file is named by --config",
    "job.description": "a comment serves",
    "job.use_for_integration_test": "it has no meaning outside TorchTitan's tests",
    "job.custom_config_module": "a module of your own is named in [job] module",
    "model.tokenizer_path": "hf_assets_path is the folder of the tokenizer's files",
    "model.converters": _QUANTIZED,
    "model.print_after_conversion": _QUANTIZED,
    "model.norm_type": "it is part of the model's registry configuration",
    "model.use_flex_attn": "attention is part of the model's registry configuration",
    "optimizer.early_step_in_backward": "TorchTitan dropped it",
    "activation_checkpoint.selective_ac_option": 'type = "selective" works on operators, as "op" did',
    "activation_checkpoint.early_stop": "TorchTitan dropped it",
    "training.enable_float8_linear": _QUANTIZED,
    "training.disable_loss_parallel": "TorchTitan decides it",
    "training.enable_loss_parallel": "TorchTitan decides it",
    "parallelism.disable_loss_parallel": "TorchTitan decides it",
    "parallelism.enable_compiled_autograd": "TorchTitan dropped it",
    "parallelism.pipeline_parallel_split_points": (
        "parallelism.module_fqns_per_model_part lists the modules of each part"
    ),
    "parallelism.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size is the size of one",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "TorchTitan dropped it",
    "parallelism.context_parallel_rotate_method": "TorchTitan dropped it",
    "parallelism.expert_tensor_parallel_degree": "TorchTitan dropped it",
    "parallelism.expert_parallel_comm_backend": "it is part of the model's registry configuration",
    "checkpoint.enable_ft_dataloader_checkpoints": "fault tolerance (torchft) is not supported here",
    "checkpoint.interval_type": "checkpoint.interval counts steps",
    "metrics.rank_0_only": "metrics.save_for_all_ranks is its opposite",
    "validation.local_batch_size": "validation takes training.local_batch_size",
    "validation.seq_len": "validation takes training.seq_len",
    "float8": _QUANTIZED,
    "mx": _QUANTIZED,
    "quantize": _QUANTIZED,
    "fault_tolerance": "fault tolerance (torchft) is not supported here",
    "memory_estimation": "`dmuon plan` plans memory",
    "experimental": "TorchTitan dropped it",
}


def renamed(key: str) -> str:
    """The new name of the same value, or "". Keys of a section that was renamed as a whole follow it."""
    table, _, rest = key.partition(".")
    return RENAMED.get(key) or (f"{_SECTIONS[table]}.{rest}" if table in _SECTIONS and gone(key) == "" else "")


def gone(key: str) -> str:
    """Why there is no such key any more, or ""."""
    return GONE.get(key) or GONE.get(key.partition(".")[0], "")


def explain(key: str) -> str:
    """What an older TorchTitan's dotted key became, as a sentence; "" for a key that none had."""
    if new := renamed(key):
        return f"It is {new} now."
    if key in RESHAPED:
        return f"It is {RESHAPED[key]}, now."
    return f"It is gone: {why}." if (why := gone(key)) else ""


def leaves(tables: Mapping[str, Any], prefix: tuple[str, ...] = (), depth: int = 3) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested tables; what is deeper than old TorchTitan's were is one value."""
    for name, value in tables.items():
        if isinstance(value, dict) and value and depth:
            yield from leaves(value, (*prefix, name), depth - 1)
        else:
            yield ".".join((*prefix, name)), value


def is_old(tables: Mapping[str, Any]) -> bool:
    """Whether a file without `[job] module` is an older TorchTitan's: it has a key that only those had."""
    return any(explain(key) for key, _ in leaves(tables))
