"""`python -m torchtitan_dmuon.train`, alone or under torchrun: parse, check, train, close.

Decides: the order of things around TorchTitan's Trainer, and how errors in a config end the process (one line, code 2).
Does not decide anything about training. Keeps: nothing that starts a process group runs before the config is checked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan_dmuon.outputs import refuse_unlike
from torchtitan_dmuon.titan import platform, toml_config
from torchtitan_dmuon.titan.config import ConfigError, NonFiniteGradients

USAGE = """\
usage: [torchrun ...] python -m torchtitan_dmuon.train --config FILE.toml [--SECTION.KEY VALUE ...]
       [torchrun ...] python -m torchtitan_dmuon.train --module MODULE --config NAME [--SECTION.KEY VALUE ...]

With a configuration, --help lists every key. docs/configuration.md explains the file."""

# torchrun ends all ranks when the first one fails; the one that speaks on each node must not be cut short.
_SILENT_RANKS_WAIT_SECONDS = 2.0
_MASTER_WAIT_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say. Returns 0, 2 for a config that cannot run, or 1 where gradients are not finite too
    often; other failures raise."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv and not any(arg.startswith("--config") for arg in argv):
        print(USAGE)
        return 0
    speaks = True  # any rank, where the environment does not tell which one it is
    try:
        alone = _default_environment()
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"
        run = toml_config.parse(argv)
        lines = ["no launcher: one process"] if alone else []
        told, tables = _checked(run)
        lines += told
    except (ConfigError, platform.PlatformError) as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr, flush=True)
            _tell_torchrun(str(error))
        else:
            time.sleep(_SILENT_RANKS_WAIT_SECONDS)
        return 2
    try:
        train(run.config, lines, tables)
    except ConfigError as error:  # of what only the running job knows, such as the checkpoint that it loads
        print(f"error: {run.source.locate(error)}", file=sys.stderr, flush=True)
        return 2
    except NonFiniteGradients as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _tell_torchrun(message: str) -> None:
    """torchrun ends with code 1 and a report of its own, which shows what a rank left in this file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        told = {"message": f"error: {message}", "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": told}, file)


def _checked(run: toml_config.Run) -> tuple[list[str], dict[str, Any]]:
    """Check the run, save its config, adapt it to the machine. Returns the lines to log, and the saved tables."""
    from torchtitan_dmuon.titan import checks, data, places

    try:
        checks.check_run(run.config, int(os.environ["WORLD_SIZE"]))
        places.check(run.config, run.source.says)
        with _dump_folder_is_usable():
            _refuse_foreign_files(run.config)
        settled = checks.settle(run.config)
        tables, left_out = toml_config.document(run)  # before this machine adapts it
        adapted = platform.adapt_config(run.config)
        data.prepare_for(run.config)
        places.check_tokenizer(run.config)
        lines = [f"config: {line}" for line in (*settled, *adapted)]
        if os.environ["RANK"] == "0":
            with _dump_folder_is_usable():
                path, *kept = toml_config.save(tables, left_out, run.config.dump_folder, adapted)
            lines.append(f"config saved in {path}")
            lines += [f"an earlier start in this folder had another one, now {path.name}" for path in kept]
    except ConfigError as error:
        raise run.source.locate(error) from None
    return lines, tables


def _refuse_foreign_files(config: Any) -> None:
    """ValueError for a file in the place of one that this run writes or renames, and that no run wrote."""
    marks = {toml_config.SAVED_NAME: toml_config.HEAD, "ownership_plan.json": '"digest"'}
    if config.debug.save_config_file:
        marks[config.debug.save_config_file] = '"hf_assets_path"'
    for name, mark in marks.items():
        refuse_unlike(Path(config.dump_folder, name), mark)


@contextlib.contextmanager
def _dump_folder_is_usable() -> Iterator[None]:
    """An OSError or ValueError of the block as a ConfigError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"dump_folder cannot be used: {error}", "dump_folder") from None


def train(config: Any, lines: Sequence[str] = (), tables: dict[str, Any] | None = None) -> None:
    """Build the config's trainer, train and close it, with the conventions of TorchTitan's own entry point.

    ``tables``: the configuration as saved, which the event files of this start keep too.
    """
    import torch
    import torchtitan
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger, logger

    from torchtitan_dmuon.titan.metrics import DMuonMetricsProcessor

    init_logger()
    logger.info("torchtitan %s, torch %s", torchtitan.__version__, torch.__version__)
    for line in lines:
        logger.info(line)
    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    trainer = None
    try:
        trainer = config.build()
        if tables and isinstance(trainer.metrics_processor, DMuonMetricsProcessor):
            trainer.metrics_processor.keep_config(tables)
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _default_environment() -> bool:
    """Without a launcher, be rank 0 of 1. Returns whether that was so. ConfigError for variables that say no rank."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _check_environment()
        _check_master()
        return False
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return True


def _check_environment() -> None:
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        for name, least in ((size, 1), (rank, 0)):
            value = os.environ.get(name, "1" if name == size else "0")
            if not re.fullmatch("[0-9]+", value) or int(value) < least:
                raise ConfigError(f"{name} = {value!r} in the environment: expected a number of at least {least}")
        if size in os.environ and int(os.environ.get(rank, "0")) >= int(os.environ[size]):
            both = f"{rank} = {os.environ[rank]}, {size} = {os.environ[size]}"
            raise ConfigError(f"{both} in the environment: expected a rank below the number of ranks")
    local, world = os.environ.get("LOCAL_WORLD_SIZE", "1"), os.environ["WORLD_SIZE"]
    if int(local) > int(world):
        both = f"LOCAL_WORLD_SIZE = {local}, WORLD_SIZE = {world}"
        raise ConfigError(f"{both} in the environment: expected no more on a node than in all")


def _check_master() -> None:
    """ConfigError on a node other than rank 0's where MASTER_ADDR is no machine, or is that node itself and nobody
    answers: the ranks would wait for each other until their timeouts. (Nodes may be emulated on one machine.)"""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if int(os.environ["RANK"]) < local or not address or not port.isdecimal():
        return
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR = {address!r} in the environment is not known on this node: {error}") from None
    deadline = time.monotonic() + _MASTER_WAIT_SECONDS
    while all(ipaddress.ip_address(each).is_loopback for each in found):
        with contextlib.suppress(OSError), socket.create_connection((address, int(port)), timeout=1):
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"MASTER_ADDR = {address!r} in the environment is this node itself, where nothing listens on port "
                f"{port}: give the launcher an address of rank 0's node that this one reaches (torchrun --local-addr)"
            )
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
