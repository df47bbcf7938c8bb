"""`dmuon compare` and the `dmuon` command: figures, refusals, and the exit code and one line of every error."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from torchtitan_dmuon import cli
from torchtitan_dmuon import compare as c

CONFIG = """\
[job]
module = "llama3"
config = "{config}"
[training]
local_batch_size = {local}
global_batch_size = {batch}
seq_len = {seq}
[parallelism]
data_parallel_replicate_degree = {replicas}
data_parallel_shard_degree = {shards}
"""


def write_config(folder: Path, **changes) -> None:
    values = dict(config="llama3_debugmodel", local=2, batch=-1, seq=128, replicas=2, shards=2) | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(**values))


def write_run(
    folder: Path,
    step_seconds: float,
    steps=range(1, 13),
    tb="tb/20250101-0000",
    dmuon=False,
    loss0=8.0,
    clock=1000.0,
    told=False,
    more=lambda step: {},
    **config,
) -> Path:
    """A run whose step takes `step_seconds`, except its first three (ten times as long) and step 7 (a checkpoint).
    ``told``: the event file has the configuration too; ``more(step)``: further scalars, or others for the same."""
    from torch.utils.tensorboard import SummaryWriter

    write_config(folder, **config)
    writer = SummaryWriter(str(folder / tb))
    if told:
        writer.add_text("config", (folder / "config.toml").read_text())
    for step in steps:
        seconds = step_seconds * (10 if step <= 3 or step == 7 else 1)
        clock += seconds
        scalars = {
            c.LOSS: loss0 - 0.1 * step,
            c.TOKENS_PER_SECOND: 256 / seconds,
            c.STEP_SECONDS: seconds,
            c.DATA_PERCENT: 10.0,
            c.PEAK_GIB: 0.5 if step == 2 else 0.25,
        }
        if dmuon:
            scalars |= {c.UPDATE_SECONDS: 0.2 * seconds, "dmuon/ns_share": 0.15, "dmuon/bytes/inter_node": 3e6}
            scalars |= {tag: 0.05 * seconds for tag in c.EXPOSED.values()}
        scalars |= more(step)
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step, walltime=clock)
    writer.close()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / "adamw", 0.5), write_run(root / "dmuon", 0.4, dmuon=True, loss0=7.0)]


def test_figures_are_medians_after_the_warm_up(runs):
    (first, second), reasons = c.compare(runs, skip=3)
    assert not reasons
    assert (first.name, first.steps, first.ratio) == ("adamw", 12, 1.0)
    assert first.tokens_per_second == pytest.approx(512) and first.step_seconds == pytest.approx(0.5)
    assert first.peak_memory_bytes == 2**29  # the highest, wherever it was
    assert first.final_loss == pytest.approx(6.8) and second.final_loss == pytest.approx(5.8)
    assert second.ratio == pytest.approx(1.25)
    assert second.extra == pytest.approx({"ns_share": 0.15, "internode_bytes_per_step": 3e6})
    alone = c.compare(runs[:1], skip=11)[0][0]  # one step is left
    assert alone.step_seconds == pytest.approx(0.5)
    assert c.compare([write_three(runs[0].parent / "short")], skip=0)[0][0].step_seconds == pytest.approx(5.0)


def write_three(folder: Path) -> Path:
    return write_run(folder, 0.5, steps=range(1, 4))  # warm-up only


def test_parts_of_a_step_add_up(runs):
    first, second = c.compare(runs, skip=3)[0]
    assert sum(first.parts.values()) == pytest.approx(0.5) and sum(second.parts.values()) == pytest.approx(0.4)
    assert second.parts["update"] == pytest.approx(0.08) and second.parts["wait: publish"] == pytest.approx(0.02)
    assert second.parts["forward and backward"] == pytest.approx(0.4 * (1 - 0.1 - 0.2 - 0.15))
    assert "update" not in first.parts and "forward, backward and update" in first.parts


def test_json_and_picture(runs, tmp_path, capsys):
    out, png = tmp_path / "new" / "c.json", tmp_path / "c.png"
    assert cli.main(["compare", *map(str, runs), "--skip", "3", "--json", str(out), "--plot", str(png)]) == 0
    written = json.loads(out.read_text())["runs"]
    assert [r["name"] for r in written] == ["adamw", "dmuon"]
    needed = {"name", "tokens_per_second", "step_seconds", "peak_memory_bytes", "final_loss", "ratio"}
    assert all(needed <= set(r) for r in written) and written[1]["ratio"] == pytest.approx(1.25)
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    table = capsys.readouterr().out
    for cell in ("adamw", "512", "0.500", "1.250", "0.50", "5.8000", "15.0%"):
        assert cell in table, cell


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(seq=256), "seq len 256 instead of 128"),
        (dict(local=4), "global batch 16 instead of 8"),
        (dict(batch=16), "global batch 16 instead of 8"),
        (dict(config="llama3_8b"), "model llama3/llama3_8b instead of llama3/llama3_debugmodel"),
        (dict(replicas=4, batch=8), "ranks 8 instead of 4"),
        (dict(shards=-1), "global batch 2 per rank instead of 8"),
    ],
)
def test_unlike_runs_get_no_ratio(runs, tmp_path, capsys, change, word):
    other = write_run(tmp_path / "other", 0.25, **change)
    assert c.main([str(runs[0]), str(other), "--json", str(tmp_path / "c.json")]) == 0
    printed = capsys.readouterr().out
    assert "no ratio for other" in printed and word in printed and "2.000" not in printed
    assert [r["ratio"] for r in json.loads((tmp_path / "c.json").read_text())["runs"]] == [1.0, None]


@pytest.mark.parametrize("same", [dict(replicas=1, shards=4), dict(batch=8, local=1)])
def test_other_meshes_and_accumulation_of_the_same_batch_are_comparable(runs, tmp_path, same):
    other = write_run(tmp_path / "other", 0.25, **same)
    assert c.compare([runs[0], other], skip=3)[0][1].ratio == pytest.approx(2.0)


def test_a_run_without_its_configuration_gets_no_ratio(runs, tmp_path, capsys):
    other = write_run(tmp_path / "other", 0.25)
    (other / "config.toml").unlink()
    assert c.main([str(other), str(runs[0])]) == 0
    assert "other has no config.toml" in capsys.readouterr().out


def test_a_resumed_run_continues_from_where_it_resumed(tmp_path):
    # Written first and named first, but later by its clock: neither the name nor the file's own time decides.
    run = write_run(tmp_path / "run", 0.5, steps=range(6, 9), tb="tb/20250101-0000", loss0=3.0, clock=5000.0)
    write_run(run, 0.5, steps=range(1, 13), tb="tb/20250101-0100")
    series = c.read_series(run)
    assert list(series[c.LOSS]) == [1, 2, 3, 4, 5, 6, 7, 8]  # 9 to 12 were undone by resuming from step 5
    assert series[c.LOSS][5][1] == pytest.approx(7.5) and series[c.LOSS][8][1] == pytest.approx(2.2)


def test_all_ranks_saved_is_one_run(tmp_path):
    for rank, seconds in enumerate((0.5, 5.0)):
        write_run(tmp_path / "run", seconds, tb=f"tb/20250101-0000/rank_{rank}")
    assert c.compare([tmp_path / "run"], skip=3)[0][0].step_seconds == pytest.approx(0.5)


def test_another_number_of_steps_is_told_beside_the_ratio(tmp_path):
    dirs = [write_run(tmp_path / "long", 0.5), write_run(tmp_path / "short", 0.5, steps=range(1, 11))]
    runs, notes = c.compare(dirs, skip=3)
    assert runs[1].ratio == pytest.approx(1.0)
    assert notes[-1] == "short ran 10 steps, long 12: their losses are of those"


def test_a_ratio_has_quartiles_and_says_when_they_include_1(tmp_path):
    first = write_run(tmp_path / "first", 0.5)
    speeds = {4: 0.9, 5: 0.95, 6: 1.0, 8: 1.1, 9: 1.2, 10: 1.3}  # times the first run's, step by step
    drifting = write_run(tmp_path / "drifting", 0.5, more=lambda s: {c.TOKENS_PER_SECOND: 512 * speeds.get(s, 1.05)})
    faster = write_run(tmp_path / "faster", 0.4, more=lambda s: {c.TOKENS_PER_SECOND: 640.0 + s})
    runs, notes = c.compare([first, drifting, faster], skip=3)
    ratios = sorted([0.9, 0.95, 1.0, 1.1, 1.2, 1.3] + [1.05 * 10] + [1.05] * 2)  # step 7 took ten times as long
    assert runs[0].ratio_quartiles is None and runs[1].ratio_steps == 9
    assert runs[1].ratio_quartiles == pytest.approx((ratios[2], ratios[4], ratios[6]))
    assert [n for n in notes if "include 1" in n] == [
        f"drifting: the quartiles of its ratio over 9 steps, {ratios[2]:.3f} to {ratios[6]:.3f}, include 1: these runs "
        "do not tell which is faster, it or first"
    ]
    assert runs[2].ratio_quartiles[0] > 1.2
    assert json.loads(json.dumps(runs[1].as_json()))["ratio_quartiles"][1] == pytest.approx(1.05)


def test_losses_say_how_many_batches_they_are_of(tmp_path, capsys):
    held_out = lambda s: {c.HELD_OUT: 7.0 - s} if s in (1, 5) else {}  # noqa: E731
    run = write_run(tmp_path / "run", 0.5, more=lambda s: {c.LOSS: float(s), **held_out(s)})
    other = write_run(tmp_path / "other", 0.5, steps=range(1, 9))
    ((first, second), _) = c.compare([run, other], skip=3)
    assert (first.final_loss, first.mean_loss, first.mean_loss_steps) == (12.0, 7.5, 10)
    assert (first.held_out_loss, first.held_out_step, second.held_out_loss) == (2.0, 5, None)
    assert second.mean_loss_steps == 8
    assert c.main([str(run), str(other), "--skip", "3", "--plot", str(tmp_path / "p.png")]) == 0
    printed = capsys.readouterr().out
    for words in ("loss of last", "7.5000 (10)", "(8)", "2.0000 @5"):
        assert words in printed, words


def test_a_loss_that_is_none_is_no_invalid_json(tmp_path):
    run = write_run(tmp_path / "run", 0.5, more=lambda s: {c.LOSS: float("nan")} if s == 12 else {})
    assert c.main([str(run), "--json", str(tmp_path / "c.json")]) == 0
    (written,) = json.loads((tmp_path / "c.json").read_text(), parse_constant=pytest.fail)["runs"]
    assert written["final_loss"] is None and written["mean_loss"] is None


def test_names_tell_folders_apart(tmp_path):
    dirs = [tmp_path / "a" / "dmuon", tmp_path / "b" / "dmuon"]
    assert c._names(dirs) == ["a/dmuon", "b/dmuon"]
    assert c._names([dirs[0], dirs[0]]) == [str(dirs[0])] * 2


def broken(name: str, root: Path) -> list[str]:
    if name == "missing":
        return [str(root / "nowhere")]
    if name == "no events":
        (root / "empty").mkdir()
        return [str(root / "empty")]
    if name == "several":
        for sub in ("adamw", "dmuon"):
            write_run(root / "outputs" / sub, 0.5, steps=range(1, 3))
        return [str(root / "outputs")]
    if name == "too short":
        return [str(write_run(root / "run", 0.5)), "--skip", "12"]
    if name == "negative":
        return [str(write_run(root / "run", 0.5)), "--skip", "-1"]
    if name == "other scalars":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(root / "run")) as writer:
            writer.add_scalar("train/loss", 1.0, 1)
        return [str(root / "run")]
    run = write_run(root / "run", 0.5)
    if name == "picture of no kind":
        return [str(run), "--plot", str(root / "x.nope")]
    if name == "picture on a folder":
        (root / "run.png").mkdir()
        return [str(run), "--plot", str(root / "run.png")]
    texts = {
        "broken configuration": "[job\n",
        "configuration of values": "training = 3\n",
        "configuration of words": '[parallelism]\ndata_parallel_shard_degree = "x"\n',
    }
    (run / "config.toml").write_text(texts[name])
    return [str(run)]


@pytest.mark.parametrize(
    "name, words",
    [
        ("missing", "no such run folder"),
        ("no events", "no TensorBoard event files"),
        ("several", "holds several runs"),
        ("too short", "last logged step is 12, but the first 12 of each start are skipped"),
        ("negative", "--skip -1"),
        ("other scalars", "no scalar 'loss_metrics/global_avg_loss'"),
        ("broken configuration", "config.toml"),
        ("configuration of values", "config.toml: job, training and parallelism must be tables, found 3"),
        ("configuration of words", "config.toml: data_parallel_shard_degree must be an integer, found 'x'"),
        ("picture of no kind", "x.nope: expected a file that ends in one of "),
        ("picture on a folder", "run.png is a folder: expected a file to write"),
    ],
)
def test_errors_are_one_line_and_exit_2(tmp_path, capsys, name, words):
    assert c.main(broken(name, tmp_path)) == 2
    printed = capsys.readouterr()
    assert words in printed.err and len(printed.err.strip().splitlines()) == 1 and not printed.out


def test_command_refuses_what_it_lacks_by_name(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "forecast", ("torchtitan_dmuon.no_such_module", "a tool to come"))
    assert cli.main(["forecast", "x.toml"]) == 2
    assert "'forecast' is not built yet" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["compere"])
    assert stop.value.code == 2 and "compere" in capsys.readouterr().err


def test_version(capsys):
    import importlib.metadata

    import torchtitan_dmuon

    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"dmuon {torchtitan_dmuon.__version__}\n"
    assert torchtitan_dmuon.__version__ == importlib.metadata.version("torchtitan_dmuon")


def test_module_entry_point_and_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchtitan_dmuon", "compare", "/no/such/run"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("torchtitan_dmuon", run_name="__main__")
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("dmuon compare: /no/such/run: no such run folder")
