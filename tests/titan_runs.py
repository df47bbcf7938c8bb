"""TorchTitan's Trainer on forked gloo ranks: small text, a byte tokenizer, half the layers of the llama3 debug model, a
TOML file. What all ranks do alike, parsing and reading the text, is done once before they are forked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from torchtitan_dmuon.titan import platform

platform.prepare()

import torchtitan.trainer  # noqa: E402
from torchtitan.hf_datasets import text_datasets  # noqa: E402
from torchtitan.models.llama3 import config_registry as _llama3  # noqa: E402, F401  (imported once, before forking)

from torchtitan_dmuon.titan import checks, toml_config, trainer  # noqa: E402, F401

LAYERS = 3  # a first, a middle and a last one

_c4_test = text_datasets.DATASETS["c4_test"]
text_datasets.DATASETS["c4_test"] = dataclasses.replace(_c4_test, loader=functools.cache(_c4_test.loader))

TOML = r"""
hf_assets_path = "{folder}/tokenizer"
dump_folder = "{folder}/{name}"

[job]
module = "llama3"
config = "llama3_debugmodel"

[training]
steps = 10
seq_len = 32
local_batch_size = 2
mixed_precision_param = "float32"

[debug]
seed = 1

[lr_scheduler]
warmup_steps = 2

[dataloader]
dataset = "c4_test"
dataset_path = "{folder}/data"

[validator]
freq = 5
steps = 2

[validator.dataloader]
dataset = "c4_test"
dataset_path = "{folder}/data"

[metrics]
log_freq = 1
disable_color_printing = true

[optimizer]
implementation = "foreach"

{matrix_group}
[[optimizer.param_groups]]
pattern = '.*'
optimizer_name = "AdamW"
optimizer_kwargs = {{ lr = 1e-3, betas = [0.9, 0.95], weight_decay = 0.1 }}
"""

MATRIX_GROUP = r"""
[[optimizer.param_groups]]
pattern = '^layers\.\d+\.(attention|feed_forward)\.'
optimizer_name = "{name}"
optimizer_kwargs = {{ lr = 4e-3, weight_decay = 0.1, adjust_lr_fn = "match_rms_adamw", ns_dtype = "float32" }}
"""


def make_folder(folder: pathlib.Path) -> pathlib.Path:
    """Text, tokenizer and one TOML file for each of AdamW, GatherMuon, DMuon and an owned AdamW in ``folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "data").mkdir()
    text = pathlib.Path(json.__file__).read_text()
    (folder / "data" / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(8)))
    text_datasets.DATASETS["c4_test"].loader(str(folder / "data"))
    (folder / "tokenizer").mkdir()
    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    for name in ("AdamW", "GatherMuon", "DMuon", "Owned:torch.optim.AdamW"):
        group = "" if name == "AdamW" else MATRIX_GROUP.format(name=name)
        if name.startswith("Owned:"):
            group = re.sub(r"lr = 4e-3.*", "lr = 1e-3, betas = [0.9, 0.95], weight_decay = 0.1 }", group)
        (folder / f"{name}.toml").write_text(TOML.format(folder=folder, name=name, matrix_group=group))
    return folder


def parse(argv: list[str]) -> toml_config.Run:
    """What the entry point would run, with fewer layers."""
    run = toml_config.parse(argv)
    model = run.config.model_spec.model
    model.layers = model.layers[:LAYERS]
    return run


def train(
    folder: pathlib.Path,
    optimizer: str,
    world: int = 4,
    *flags: str,
    mesh: tuple[int, int] = (2, 2),
    ranks_per_node: int | None = None,
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
    limit: float = 240,
) -> list[dict[str, Any]]:
    """Run the trainer on forked ranks. Per rank: {"steps": [(step, loss, grad norm)], "metrics": [...],
    "validations": [(step, loss)], "before": ..., "after": ...}.

    ``before(trainer)`` and ``after(trainer)`` run on every rank around the training.
    """
    argv = [
        "--config",
        str(folder / f"{optimizer}.toml"),
        "--parallelism.data_parallel_replicate_degree",
        str(mesh[0]),
        "--parallelism.data_parallel_shard_degree",
        str(mesh[1]),
        *flags,
    ]
    return run_ranks(_job, world, parse(argv), before, after, ranks_per_node=ranks_per_node, limit=limit, init=False)


def _job(
    rank: int,
    world: int,
    run: toml_config.Run,
    before: Callable[[Any], Any] | None,
    after: Callable[[Any], Any] | None,
) -> dict[str, Any]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.disable(logging.INFO)
    torchtitan.trainer.time.sleep = lambda _seconds: None  # it lets other ranks finish printing
    checks.check_run(run.config, world)
    checks.settle(run.config)
    platform.adapt_config(run.config)
    made = run.config.build()
    steps: list[tuple[int, float, float]] = []
    metrics: list[dict[str, float]] = []
    validations: list[tuple[int, float]] = []
    log = made.metrics_processor.log
    written = made.metrics_processor.logger.log

    def record(step: int, loss: float, max_loss: float, grad_norm: float, **kwargs: Any) -> None:
        steps.append((step, loss, float(grad_norm)))
        log(step, loss, max_loss, grad_norm, **kwargs)

    def keep(values: dict[str, Any], step: int) -> None:
        if "validation_metrics/loss" in values:
            validations.append((step, values["validation_metrics/loss"]))
        else:
            metrics.append(dict(values))
        written(values, step)

    made.metrics_processor.log, made.metrics_processor.logger.log = record, keep
    result: dict[str, Any] = {"steps": steps, "metrics": metrics, "validations": validations}
    result["before"] = before(made) if before is not None else None
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        made.train()
    result["after"] = after(made) if after is not None else None
    made.close()
    dist.destroy_process_group()
    return result


def masters(made: Any) -> dict[str, torch.Tensor]:
    """What a rank owns: masters by piece key, and momenta under "momentum:" + name."""
    owned = made.owned
    found = {key: value.clone() for key, value in owned.masters().items()}
    inner = made.optimizers.owned_optimizer.inners[0]
    for group in inner.param_groups:
        for name, param in zip(group["param_names"], group["params"]):
            if param in inner.state:
                found[f"momentum:{name}"] = inner.state[param]["momentum_buffer"].clone()
    return found
