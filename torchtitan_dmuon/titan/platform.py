"""TorchTitan's stock Trainer on machines without an accelerator (CPU and gloo) or without triton.

Decides: what is replaced inside TorchTitan 0.3.0 so that its Trainer runs there, and how a config is adapted to the
machine. Does not decide anything on CUDA, where every function here leaves its argument as it was. Keeps: importing
this module patches nothing; each replacement is made by :func:`prepare`, once, next to its reason, and fails loudly
when the seam it was read at (the wheel's 0.3.0) is no longer there.

Shape suffixes: B batch, L sequence (Lq, Lk), N heads, H head dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import resource
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchtitan_dmuon.newton_schulz import cpu_has_fast_bf16
from torchtitan_dmuon.titan.config import ConfigError

READ_IN = "torchtitan 0.3.0"
# What `override.imports` lists; TorchTitan finds the factory by this name after importing this module.
ATTENTION_OVERRIDE = f"{__name__}.dense_mask_attention"
# MFU needs some figure; a CPU has no published one. 1 TFLOP/s makes the logged MFU readable as "per TFLOP/s".
_NOMINAL_CPU_FLOPS = 1e12
# Modules that copy names out of torchtitan.tools.utils when they are imported (`from ... import device_type`).
_COPIES_DEVICE = (
    "torchtitan.components.metrics",
    "torchtitan.distributed.parallel_dims",
    "torchtitan.distributed.utils",
    "torchtitan.models.common.token_dispatcher",
    "torchtitan.tools.profiler",
)


class PlatformError(RuntimeError):
    """TorchTitan is not as it was read, or was imported too early."""


def on_cpu() -> bool:
    """Whether training runs on CPU and gloo: torch sees no accelerator, or only one without collectives (Apple's)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is None or accelerator.type == "mps"


def prepare() -> None:
    """Make torchtitan importable and its Trainer runnable here. Call it before importing other torchtitan modules.

    Can be called again. Does nothing on CUDA with triton. Raises :class:`PlatformError` when it comes too late, or when
    a seam is missing in the installed torchtitan.
    """
    if importlib.util.find_spec("triton") is None:
        _stub_triton_kernels()
    if not on_cpu():
        return
    import torchtitan.tools.utils as tools

    if isinstance(getattr(tools, "device_module", None), CpuDeviceModule):
        return
    early = [name for name in _COPIES_DEVICE if name in sys.modules]
    if early:
        raise PlatformError(
            f"{', '.join(early)}: imported before platform.prepare(), with the device module of CUDA. On a "
            "machine without an accelerator start with `python -m torchtitan_dmuon.train`, not `-m torchtitan.train`"
        )
    # The device is chosen at import and falls back to "cuda" where there is no accelerator (tools/utils.py:57).
    _replace(tools, "device_type", "cpu")
    _replace(tools, "device_module", CpuDeviceModule())
    # It would answer cpu:LOCAL_RANK, and a tensor on cpu:1 is not on the device of a tensor on cpu (tools/utils.py:63).
    _replace(tools, "get_local_device", lambda: torch.device("cpu"))
    # It runs `lspci` and falls back to an A100's figure (tools/utils.py:147).
    _replace(tools, "get_peak_flops", lambda device_name: _NOMINAL_CPU_FLOPS)

    import torchtitan.models.common.attention as attention
    from torch.nn.attention.flex_attention import create_block_mask

    # Compiling the mask needs a C++ compiler at run time, which a plain machine may lack (common/attention.py:622).
    _replace(attention, "_compiled_create_block_mask", create_block_mask)
    _define_attention_override(attention)
    warnings.filterwarnings("ignore", message=".*DTensor (random operators|manual_seed).*")


def adapt_config(config: Any) -> list[str]:
    """Adapt a Trainer.Config to this machine, in place. Returns one line for each setting that was changed, or that the
    user had better change; none on CUDA.

    Raises :class:`ConfigError` for a setting that cannot work on CPU.
    """
    if not on_cpu():
        return []
    import torchtitan.models.common.attention as attention

    changes = []
    if config.training.mixed_precision_param == "bfloat16" and not cpu_has_fast_bf16():
        changes.append("this CPU only emulates bf16: --training.mixed_precision_param float32 is several times faster")
    if config.optimizer.implementation.startswith("fused"):
        changes.append(
            f"optimizer.implementation {config.optimizer.implementation!r} -> 'foreach' (fused is CUDA only)"
        )
        config.optimizer.implementation = "foreach"
    if not config.training.disable_cuda_graphs:
        changes.append("training.disable_cuda_graphs -> true (no CUDA)")
        config.training.disable_cuda_graphs = True
    for key, wanted in (
        ("profiler.enable_memory_snapshot", config.profiler.enable_memory_snapshot),
        ("training.gc_debug", config.training.gc_debug),
    ):
        if wanted:
            raise ConfigError(f"{key.rpartition('.')[2]} needs CUDA", key)
    if config.training.enable_cpu_offload:
        changes.append("training.enable_cpu_offload -> false (everything is on the CPU)")
        config.training.enable_cpu_offload = False
    spec = config.model_spec
    if spec is None:
        return changes
    if any(True for _ in spec.traverse(attention.VarlenAttention.Config)):
        raise ConfigError(
            f"{spec.name} {spec.flavor} uses varlen attention, which needs CUDA; choose a config with flex or sdpa "
            "attention",
            "job.config",
        )
    listed = [entry if isinstance(entry, str) else entry[0] for entry in config.override.imports]
    if ATTENTION_OVERRIDE not in listed and any(True for _ in spec.traverse(attention.FlexAttention.Config)):
        changes.append("flex attention -> dense mask (flex attention has no backward on CPU)")
        config.override.imports = [*config.override.imports, ATTENTION_OVERRIDE]
    config.model_spec = dataclasses.replace(spec, parallelize_fn=_with_sum_reduction(spec.parallelize_fn))
    return changes


def force_sum_reduction(model: torch.nn.Module) -> None:
    """Make FSDP2 scale gradients outside its collectives: gloo knows neither PREMUL_SUM nor its like. No-op on CUDA."""
    if not on_cpu():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _with_sum_reduction(parallelize: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(parallelize)
    def wrapped(model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        model = parallelize(model, **kwargs)
        force_sum_reduction(model)
        return model

    return wrapped


def _replace(module: types.ModuleType, name: str, value: Any) -> None:
    if not hasattr(module, name):
        raise PlatformError(
            f"{module.__name__}.{name} is missing; it was there in {READ_IN}, and the CPU platform replaces it. "
            f"Install {READ_IN.replace(' ', '==')}"
        )
    setattr(module, name, value)


# --- device module ------------------------------------------------------------------------------------------------


class CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` with the CUDA names that TorchTitan calls; memory figures are this process's resident set."""

    def __init__(self) -> None:
        super().__init__("torchtitan_dmuon_cpu_device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        """One device; nothing to choose."""

    def current_device(self) -> int:
        """An index: TorchTitan passes it to ``barrier(device_ids=...)``, which refuses torch.cpu's string."""
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(name="CPU", total_memory=_memory_limit_bytes())

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        peak = _peak_resident_bytes()
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        # Writing 5 resets this process's high-water mark (proc(5)); where that is not allowed the peak is of its life.
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def empty_cache(self) -> None:
        """The allocator of the CPU keeps no cache."""


def _peak_resident_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _memory_limit_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as file:
        return min(physical, int(file.read()))
    return physical


# --- attention ----------------------------------------------------------------------------------------------------


def _define_attention_override(attention: types.ModuleType) -> None:
    """Register the dense-mask attention with TorchTitan's override mechanism, under :data:`ATTENTION_OVERRIDE`.

    FlexAttention raises "does not support backward on CPU", compiled or not (torch 2.14). The classes are defined here,
    not at the top, because their base can only be imported once the device module is in place.
    """
    from torch.nn.attention.flex_attention import create_mask
    from torchtitan.config.override import derive, override

    for name in ("FlexAttention", "VarlenAttention"):
        if not hasattr(attention, name):
            raise PlatformError(f"{attention.__name__}.{name} is missing; it was there in {READ_IN}")

    class DenseMaskAttention(attention.FlexAttention):
        """The same attention from a materialized boolean mask [B, 1, Lq, Lk]. O(Lq Lk) memory: for short sequences."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(attention.FlexAttention.Config):
            pass

        def forward(
            self,
            q_BLNH,
            k_BLNH,
            v_BLNH,
            *,
            attention_masks,
            score_mod=None,
            scale=None,
            enable_gqa=False,
            out_transform=None,
            **kwargs,
        ):
            if score_mod is not None:
                raise NotImplementedError("the dense-mask attention of the CPU platform has no score_mod")
            # The mask is a function of the batch alone; all layers of a forward get the same object.
            mask = getattr(attention_masks, "dense_mask", None)
            if mask is None:
                lengths = (q_BLNH.shape[0], None, q_BLNH.shape[1], k_BLNH.shape[1])
                mask = create_mask(attention_masks.mask_mod, *lengths, device=q_BLNH.device)
                attention_masks.dense_mask = mask
            q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
            if out_transform is None:
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
                )
                return out.transpose(1, 2)
            # gpt_oss rescales by the log-sum-exp of the scores, which SDPA does not return.
            if enable_gqa:
                groups = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
            scores = scores.float().masked_fill(~mask, float("-inf"))
            lse = scores.logsumexp(dim=-1)
            out = torch.exp(scores - lse[..., None]).to(v.dtype) @ v
            return out_transform(out.transpose(1, 2), lse.transpose(1, 2))

    def dense_mask_attention(config):
        return derive(config, DenseMaskAttention.Config)

    override(target=attention.FlexAttention.Config, description="dense-mask attention for CPU")(dense_mask_attention)


# --- triton -------------------------------------------------------------------------------------------------------


def _stub_triton_kernels() -> None:
    """Let torchtitan be imported where triton is not installed, as with torch's CPU wheels.

    TorchTitan imports triton without asking in one module of kernels for expert parallelism. That module alone is
    stubbed: a fake ``triton`` would mislead torch's own probing for it.
    """
    name = "torchtitan.distributed.minimal_async_ep.kernels"
    if name in sys.modules:
        return
    if importlib.util.find_spec("torchtitan") is not None and _module_file(name) is None:
        raise PlatformError(f"{name} is missing; it was there in {READ_IN}, and importing it needs triton")

    class Missing(types.ModuleType):
        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)

            def missing(*args: Any, **kwargs: Any) -> Any:
                raise RuntimeError(f"{name}.{attribute} needs triton, which is not installed")

            return missing

    sys.modules[name] = Missing(name)


def _module_file(name: str) -> str | None:
    """Path of a torchtitan submodule, without importing its parents (which would import the module itself)."""
    spec = importlib.util.find_spec("torchtitan")
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = os.path.join(root, *name.split(".")[1:]) + ".py"
        if os.path.exists(path):
            return path
    return None
