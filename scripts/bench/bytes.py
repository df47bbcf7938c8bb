"""Bytes between nodes in one step of the bench's model, as planned and as the kernel counts them. No lab, no timing.

Decides: what is shown: HSDP on 2 x 2 ranks, where FSDP2's own part moves on gloo as planned too. Between several shards
over two nodes gloo's collectives do not follow the nodes; there the owned bytes alone are held, in `tests/netlab`.
Planned figures are `footprint.py`'s, what `dmuon plan` prints, for variants that all reduce between nodes once a step.

    python -m scripts.bench.bytes [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (the runtime's hooks use it: imported once, before ranks are forked)

from scripts.netlab.lab import run_on_loopback
from torchtitan_dmuon.footprint import Footprint, footprint
from torchtitan_dmuon.loads import Loads
from torchtitan_dmuon.outputs import add_output_arguments, parse_args, write_json
from torchtitan_dmuon.simulate import lay_out

from .measure import Bench
from .model import Settings
from .predict import Benched

REPLICAS, RANKS_PER_NODE, WORLD = 2, 2, 4
VARIANTS = ("adamw_async", "dmuon")
ACCUMULATIONS = (1, 4)


def measure(rank: int, world: int, settings: Settings) -> dict[str, dict[str, int]]:
    bench = Bench(settings, VARIANTS, REPLICAS)
    for variant in bench.variants.values():
        variant.train_step(0)
        variant.drain()
    bench.index = 1
    figures = bench.bytes_per_step(RANKS_PER_NODE)
    bench.close()
    return figures


def planned(settings: Settings, variant: str) -> Loads:
    benched = Benched.of(settings, REPLICAS, WORLD // REPLICAS, RANKS_PER_NODE)
    groups = lay_out(benched.owned.groups, benched.topology, benched.plan)
    found = footprint(benched.topology, groups, benched.owned.options)
    return Footprint.total(found.adamw_traffic if variant == "adamw_async" else found.traffic)


def busiest_node(loads: Loads) -> int:
    """The most that one node sends to, or receives from, the others."""
    both = (loads.sent_far_W, loads.received_far_W)
    return max(int(each.view(-1, RANKS_PER_NODE).sum(1).max()) for each in both)


def rows() -> list[dict[str, Any]]:
    made = []
    for accumulation in ACCUMULATIONS:
        settings = replace(Settings(batch=2), accumulation=accumulation)
        measured = run_on_loopback(measure, WORLD, settings, ranks_per_node=RANKS_PER_NODE, limit=120)[0]
        for variant in VARIANTS:
            # Micro-batches add nothing between nodes: gathers and first sums stay inside.
            loads = planned(replace(settings, accumulation=1), variant)
            total, link = (
                measured[variant]["internode_bytes_per_step"],
                measured[variant]["busiest_link_bytes_per_step"],
            )
            made.append(
                {
                    "accumulation": accumulation,
                    "variant": variant,
                    "planned_bytes": loads.far,
                    "measured_bytes": total,
                    "ratio": total / loads.far,
                    "planned_busiest_link_bytes": busiest_node(loads),
                    "measured_busiest_link_bytes": link,
                    "busiest_link_ratio": link / busiest_node(loads),
                }
            )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.bytes", description=__doc__.split("\n\n")[0])
    add_output_arguments(parser, picture=False)
    args = parse_args(parser, argv)
    torch.set_num_threads(1)
    found = rows()
    print("accumulation  variant      MB planned  measured  ratio   busiest link planned  measured  ratio")
    for r in found:
        total = f"{r['planned_bytes'] / 1e6:10.3f}  {r['measured_bytes'] / 1e6:8.3f}  {r['ratio']:.3f}"
        link = f"{r['planned_busiest_link_bytes'] / 1e6:20.3f}  {r['measured_busiest_link_bytes'] / 1e6:8.3f}"
        print(f"{r['accumulation']:12}  {r['variant']:11}  {total}   {link}  {r['busiest_link_ratio']:.3f}")
    if args.json:
        write_json(args.json, {"rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
