"""TorchTitan on CPU: what is replaced, that it fails loudly when a seam moves, and short runs of the stock Trainer."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import tomli
import torch

from tests.ranks import run_ranks
from torchtitan_dmuon.titan import platform

platform.prepare()

import torchtitan.models.common.attention as attention  # noqa: E402
import torchtitan.tools.utils as tools  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402
from torchtitan.config.override import _REGISTRY  # noqa: E402
from torchtitan.models.llama3.config_registry import (  # noqa: E402
    llama3_debugmodel,
    llama3_debugmodel_varlen_attn,
)

pytestmark = pytest.mark.skipif(
    not platform.on_cpu(), reason="the platform is inactive where torch sees an accelerator"
)


# --- replacements -------------------------------------------------------------------------------------------------


def test_the_device_is_this_process():
    module = tools.device_module
    assert (tools.device_type, tools.get_local_device()) == ("cpu", torch.device("cpu"))
    assert module.current_device() == 0 and module.device_count() == 1
    assert tools.get_peak_flops("CPU") > 0
    module.synchronize()
    total = module.get_device_properties().total_memory
    module.reset_peak_memory_stats()
    before = module.memory_stats()["active_bytes.all.peak"]
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = module.memory_stats()["active_bytes.all.peak"]
    assert 60 * 2**20 < after - before < 200 * 2**20
    assert 0 < before < after < total
    del block


def test_a_missing_seam_fails_loudly(monkeypatch):
    monkeypatch.setattr(tools, "device_module", torch.cpu)  # as if prepare() had not run
    monkeypatch.setattr(platform, "_COPIES_DEVICE", ())
    monkeypatch.delattr(tools, "get_peak_flops")
    with pytest.raises(platform.PlatformError, match=r"torchtitan.tools.utils.get_peak_flops is missing.*0\.3\.0"):
        platform.prepare()
    monkeypatch.undo()
    monkeypatch.setattr(tools, "device_module", torch.cpu)
    monkeypatch.setattr(platform, "_COPIES_DEVICE", ())
    monkeypatch.delattr(attention, "_compiled_create_block_mask")
    with pytest.raises(platform.PlatformError, match="_compiled_create_block_mask is missing"):
        platform.prepare()


def test_coming_too_late_is_refused(monkeypatch):
    import torchtitan.components.metrics  # noqa: F401

    monkeypatch.setattr(tools, "device_module", torch.cpu)
    with pytest.raises(platform.PlatformError, match=r"torchtitan.components.metrics.*imported before.*-m torchtitan_"):
        platform.prepare()


def test_every_module_that_copies_the_device_is_known():
    """`from torchtitan.tools.utils import device_...` in a module that is not listed would keep CUDA's unnoticed."""
    root = pathlib.Path(tools.__file__).parents[1]
    copies = set()
    for path in root.rglob("*.py"):
        name = ".".join(("torchtitan", *path.relative_to(root).with_suffix("").parts))
        imported = re.search(r"from torchtitan\.tools\.utils import ([^\n(]+|\([^)]*\))", path.read_text())
        if imported and re.search(r"\b(device_type|device_module|get_local_device)\b", imported[1]):
            copies.add(name)
    copies = {name for name in copies if not name.startswith(("torchtitan.experiments", "torchtitan.overrides"))}
    assert copies == set(platform._COPIES_DEVICE)


def test_a_config_is_adapted_once_and_only_here(monkeypatch):
    monkeypatch.setattr(platform, "cpu_has_fast_bf16", lambda: False)
    config = llama3_debugmodel()
    changes = platform.adapt_config(config)
    assert len(changes) == 4 and config.training.disable_cuda_graphs
    assert "only emulates bf16" in changes[0] and config.training.mixed_precision_param == "bfloat16"
    assert config.optimizer.implementation == "foreach"
    assert config.override.imports == [platform.ATTENTION_OVERRIDE]
    platform.adapt_config(config)
    assert config.override.imports == [platform.ATTENTION_OVERRIDE]

    monkeypatch.setattr(platform, "on_cpu", lambda: False)
    config = llama3_debugmodel()
    spec = config.model_spec
    assert platform.adapt_config(config) == []
    assert config.model_spec is spec and not config.training.disable_cuda_graphs
    assert config.optimizer.implementation == "fused" and config.override.imports == []


def test_what_cannot_run_on_cpu_is_refused():
    with pytest.raises(ValueError, match="varlen attention, which needs CUDA"):
        platform.adapt_config(llama3_debugmodel_varlen_attn())
    config = llama3_debugmodel()
    config.profiler.enable_memory_snapshot = True
    with pytest.raises(ValueError, match="enable_memory_snapshot needs CUDA"):
        platform.adapt_config(config)


# --- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_lse", [False, True])
def test_dense_mask_attention_equals_flex_attention(with_lse):
    run_ranks(_compare_attention, 1, with_lse)  # forked: a backward here would forbid one in every later fork


def _compare_attention(rank, world, with_lse):
    torch.manual_seed(0)
    q_BLNH, k_BLNH, v_BLNH = (torch.randn(2, 24, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    document = torch.tensor([[0] * 10 + [1] * 14, [0] * 24])

    def causal_in_document(b, h, i, j):
        return (i >= j) & (document[b, i] == document[b, j])

    mask = create_block_mask(causal_in_document, 2, None, 24, 24, device="cpu")
    override = _REGISTRY[platform.ATTENTION_OVERRIDE]
    module = override.factory(attention.FlexAttention.Config()).build()
    transform = (lambda out, lse: out * torch.sigmoid(lse)[..., None]) if with_lse else None
    got = module(q_BLNH, k_BLNH, v_BLNH, attention_masks=mask, scale=0.3, enable_gqa=True, out_transform=transform)
    with torch.no_grad():
        q, k, v = (t.detach().transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        expected, lse = flex_attention(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True, return_lse=True)
        expected = expected.transpose(1, 2)
        if with_lse:
            expected = transform(expected, lse.transpose(1, 2))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    assert q_BLNH.grad.isfinite().all() and k_BLNH.grad.abs().sum() > 0


# --- triton -------------------------------------------------------------------------------------------------------


def test_torchtitan_imports_without_triton():
    script = """
import sys
sys.modules["triton"] = None  # what a missing package looks like to import and to find_spec
from torchtitan_dmuon.titan import platform
platform.prepare()
import torchtitan.trainer
import torchtitan.distributed.minimal_async_ep.kernels as kernels
try:
    kernels.some_kernel()
except RuntimeError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "some_kernel needs triton" in done.stdout


# --- the Trainer --------------------------------------------------------------------------------------------------

TOML = r"""
hf_assets_path = "{folder}/tokenizer"
dump_folder = "{folder}/first"

[job]
module = "llama3"
config = "llama3_debugmodel"

[training]
steps = 3
seq_len = 32
local_batch_size = 2
mixed_precision_param = "float32"

[debug]
seed = 1

[lr_scheduler]
warmup_steps = 0

[dataloader]
dataset = "c4_test"
dataset_path = "{folder}/data"

[metrics]
enable_tensorboard = true
disable_color_printing = true

[[optimizer.param_groups]]
pattern = '^layers\.\d+\.(attention|feed_forward)\.'
optimizer_name = "GatherMuon"
optimizer_kwargs = {{ lr = 2e-3, ns_steps = 1, adjust_lr_fn = "match_rms_adamw" }}

[[optimizer.param_groups]]
pattern = '.*'
optimizer_name = "AdamW"
optimizer_kwargs = {{ lr = 2e-3, betas = [0.9, 0.95] }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text data set, a tokenizer of bytes, and run.toml."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("train")
    (folder / "data").mkdir()
    text = pathlib.Path(json.__file__).read_text()
    (folder / "data" / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(4)))
    (folder / "tokenizer").mkdir()
    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "run.toml").write_text(TOML.format(folder=folder))
    return folder


def _train(world, arguments, log, limit=240):
    """Fork ranks that run the entry point as a launcher would; exit codes in rank order, output in ``log``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ.update(
                    RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
                )
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
                out = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                torch.set_num_threads(1)
                from torchtitan_dmuon import train

                code = train.main(arguments)
            except BaseException:
                import traceback

                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    codes: list[int | None] = [None] * world
    deadline = time.monotonic() + limit
    while None in codes and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if codes[rank] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                codes[rank] = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.1)
    for rank, pid in enumerate(pids):
        if codes[rank] is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def _losses(log):
    return [float(x) for x in re.findall(r"step: +\d+ .*?loss: +([\d.]+)", pathlib.Path(f"{log}.0").read_text())]


def test_two_ranks_train_and_the_saved_config_repeats_the_run(folder):
    log = folder / "first.log"
    codes = _train(2, ["--config", str(folder / "run.toml"), "--parallelism.data_parallel_shard_degree", "2"], log)
    output = pathlib.Path(f"{log}.0").read_text()
    assert codes == [0, 0], output
    losses = _losses(log)
    assert len(losses) == 3 and losses[2] < losses[0]
    assert "optimizer.implementation 'fused' -> 'foreach'" in output
    assert list((folder / "first").rglob("events.out.tfevents*"))

    saved = folder / "first" / "config.toml"
    config = tomli.loads(saved.read_text())
    assert config["parallelism"]["data_parallel_shard_degree"] == 2  # the flag, too
    assert config["override"]["imports"] == []  # what this machine needs is not part of the run
    again = folder / "again.log"
    codes = _train(2, ["--config", str(saved), "--dump_folder", str(folder / "again")], again)
    assert codes == [0, 0], pathlib.Path(f"{again}.0").read_text()
    assert _losses(again) == losses


def test_a_mesh_that_does_not_fit_ends_every_rank_with_code_2_and_one_line(folder):
    log = folder / "mesh.log"
    file = folder / "run.toml"
    codes = _train(2, ["--config", str(file), "--parallelism.data_parallel_replicate_degree", "3"], log)
    assert codes == [2, 2]
    lines = [line for line in pathlib.Path(f"{log}.0").read_text().splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "--parallelism.data_parallel_replicate_degree: the mesh of" in lines[0]
    assert "error:" not in pathlib.Path(f"{log}.1").read_text()
