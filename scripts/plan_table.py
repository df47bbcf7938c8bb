"""The tables of docs/planning.md: plans and simulated steps of five models on 8 to 1,024 ranks, by one command.

Decides: models, meshes and worlds, and what splitting one matrix over a node's ranks would gain. Every figure is
`plan`'s or `simulate`'s own.

    python -m scripts.plan_table [--json FILE] [--models 8B,70B] [--worlds 8,64]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_dmuon.newton_schulz import flops
from torchtitan_dmuon.outputs import add_output_arguments, parse_args, write_json
from torchtitan_dmuon.plan import DEFAULT_FLOPS, summary
from torchtitan_dmuon.simulate import VARIANTS, read_cluster, simulate
from torchtitan_dmuon.step_model import Cluster
from torchtitan_dmuon.titan import toml_config
from torchtitan_dmuon.titan.planning import Planned, make_plan

CONFIGS = Path(__file__).parents[1] / "train_configs"
# Name -> (arguments, flavor, shards). 8,192 tokens a rank and step.
MODELS: dict[str, tuple[list[str], str, int]] = {
    "llama3 8B": (["--config", str(CONFIGS / "llama3_8b_dmuon.toml")], "", 8),
    "llama3 70B": (["--config", str(CONFIGS / "llama3_70b_dmuon.toml")], "", 32),
    "llama3 405B": (["--config", str(CONFIGS / "llama3_70b_dmuon.toml")], "405B", 64),
    "qwen3 32B": (["--config", str(CONFIGS / "qwen3_32b_dmuon.toml")], "", 16),
    "qwen3 30B-A3B": (["--module", "qwen3", "--config", "qwen3_30b_a3b"], "", 8),
}
WORLDS = (8, 64, 256, 1024)


def plan_of(model: str, world: int, holders: str) -> Planned:
    arguments, flavor, shards = MODELS[model]
    config = toml_config.parse(arguments).config
    config.training.local_batch_size, config.training.seq_len = 1, 8192
    if model == "qwen3 30B-A3B":
        config.training.local_batch_size, config.training.seq_len = 2, 4096
    config.training.global_batch_size = -1
    shards = min(shards, world)
    config.parallelism.data_parallel_shard_degree = shards
    config.parallelism.data_parallel_replicate_degree = world // shards
    if hasattr(config, "dmuon"):
        config.dmuon.holders = holders
    return make_plan(config, world, 8, flavor=flavor)


def splitting(planned: Planned, cluster: Cluster, ranks: int) -> tuple[float, float, float]:
    """(seconds of the largest owner's update, its least with large matrices split over 2 to ``ranks`` ranks of a node,
    the seconds of messages in that). Optimistic: parts are taken to pack perfectly.

    Split by columns of the longer side, each of k ranks takes 1/k of the products with X and repeats those of [s, s]:
    T (4 s^2 l / k + 2 s^3) FLOPs, with one all-reduce of [s, s] in bf16 a step, and X scattered and gathered in bf16.
    """
    settings = planned.options.settings
    steps = settings.steps
    rate = DEFAULT_FLOPS
    best = (max(planned.ns_flops()) / rate, max(planned.ns_flops()) / rate, 0.0)
    kinds: dict[tuple[int, int], int] = {}
    for piece in planned.plan.pieces:
        for m, n in piece.matrices():
            kinds[min(m, n), max(m, n)] = kinds.get((min(m, n), max(m, n)), 0) + 1
    whole = {(s, l): flops(s, l, settings, "cuda") / rate for s, l in kinds}
    for k in (k for k in (2, 4, 8) if k <= ranks):
        for limit in sorted(set(whole.values())):
            total, largest, messages = 0.0, 0.0, 0.0
            for (s, l), count in kinds.items():
                seconds, sent, parts = whole[s, l], 0.0, 1
                if seconds >= limit:
                    moved = 2 * (k - 1) / k * (steps * s * s + s * l) * 2
                    sent = moved / cluster.near_rate + (2 * steps + 2) * cluster.near_latency
                    seconds, parts = steps * (4 * s * s * l / k + 2 * s**3) / rate + sent, k
                total += count * parts * seconds
                largest, messages = max(largest, seconds), max(messages, sent)
            found = max(largest, total / planned.plan.n_owners)
            if found < best[1]:
                best = (best[0], found, messages)
    return best


def row(model: str, world: int, cluster: Cluster) -> dict[str, Any]:
    begin = time.perf_counter()
    planned = plan_of(model, world, "shard_group")
    figures = summary(planned, DEFAULT_FLOPS)
    steps = {name: found for name, (_, found) in simulate(planned, cluster, VARIANTS).items()}
    now, split, sent = splitting(planned, cluster, min(8, world))
    return {
        "model": model,
        "world": world,
        "mesh": f"{planned.topology.replicas} x {planned.topology.shard_size}",
        "over_bound": figures["largest_cost"] / figures["lower_bound"],
        "over_mean": figures["imbalance"],
        "idle_owners": figures["idle_owners"],
        "ns_milliseconds": figures["ns_milliseconds"],
        "splitting_saves_milliseconds": 1e3 * (now - split),
        "splitting_messages_milliseconds": 1e3 * sent,
        "peak_bytes_per_rank": figures["peak_bytes_per_rank"],
        "peak_bytes_per_rank_node_holders": steps.get("dmuon_node_holders", {}).get("peak_bytes_per_rank"),
        "adamw_peak_bytes_per_rank": figures["adamw_peak_bytes_per_rank"],
        "internode_bytes_per_step": figures["internode_bytes_per_step"],
        "adamw_internode_bytes_per_step": figures["adamw_internode_bytes_per_step"],
        "busiest_link_bytes": figures["busiest_link_bytes"],
        "adamw_busiest_link_bytes": figures["adamw_busiest_link_bytes"],
        "variants": steps,
        "seconds_of_this_row": time.perf_counter() - begin,
    }


def plan_line(r: dict[str, Any]) -> str:
    peaks = [r["peak_bytes_per_rank"], r["peak_bytes_per_rank_node_holders"], r["adamw_peak_bytes_per_rank"]]
    shown = " / ".join("-" if p is None else f"{p / 2**30:.0f}" for p in peaks)
    far = f"{r['internode_bytes_per_step'] / 1e9:,.0f} / {r['adamw_internode_bytes_per_step'] / 1e9:,.0f}"
    busy = f"{r['busiest_link_bytes'] / 1e9:,.1f} / {r['adamw_busiest_link_bytes'] / 1e9:,.1f}"
    cells = (
        r["model"],
        r["world"],
        r["mesh"],
        f"{r['over_bound']:.3f}",
        f"{r['over_mean']:.2f}",
        r["idle_owners"],
        f"{r['ns_milliseconds']:,.0f}",
        f"{r['splitting_saves_milliseconds']:.1f} ({r['splitting_saves_milliseconds'] / step_ms(r):.1%})",
        shown,
        far,
        busy,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def step_ms(r: dict[str, Any]) -> float:
    names = ("dmuon", "dmuon_node_holders")
    return 1e3 * min(r["variants"][n]["step_seconds"] for n in names if n in r["variants"])


def step_line(r: dict[str, Any]) -> str:
    found = r["variants"]

    def ratio(name: str, key: str = "ratio_to_adamw") -> str:
        return f"{found[name][key]:.2f}" if name in found else "-"

    best = "dmuon_node_holders" if "dmuon_node_holders" in found else "dmuon"
    cells = [r["model"], r["world"], f"{found['adamw']['step_seconds']:.2f}"]
    cells += [ratio(n) for n in VARIANTS[1:]] + [ratio(best, "ratio_to_gather_muon")]
    return "| " + " | ".join(map(str, cells)) + " |"


def header(*names: str) -> str:
    return "| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.plan_table", description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", default="", help="parts of names, comma-separated; default: all")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--cluster", default="h100")
    add_output_arguments(parser, picture=False)
    args = parse_args(parser, argv)
    cluster = read_cluster(args.cluster)
    chosen = [m for m in MODELS if any(part in m for part in args.models.split(","))]
    rows = []
    for model in chosen:
        for world in map(int, args.worlds.split(",")):
            rows.append(row(model, world, cluster))
            print(f"{model} on {world}: {rows[-1]['seconds_of_this_row']:.1f} s", file=sys.stderr, flush=True)
    print(
        header(
            "model",
            "ranks",
            "R x S",
            "largest / bound",
            "/ mean",
            "idle",
            "NS, ms",
            "splitting saves, ms",
            "peak GiB: DMuon / node holders / AdamW",
            "GB between nodes: DMuon / AdamW",
            "busiest link, GB",
        )
    )
    print("\n".join(map(plan_line, rows)))
    print()
    print(header("model", "ranks", "AdamW, s", *VARIANTS[1:], "best / GatherMuon"))
    print("\n".join(map(step_line, rows)))
    if args.json:
        write_json(args.json, {"cluster": cluster.name, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
