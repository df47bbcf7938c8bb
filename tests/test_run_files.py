"""Which event files are a run's own, what starts of it belong together, and what is said of files that are damaged."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_compare import CONFIG, write_config, write_run
from torchtitan_dmuon import compare as c
from torchtitan_dmuon import run_files


def lr(*names):
    return lambda step: {f"lr/{name}": 1e-3 for name in names}


# --- runs inside runs ---------------------------------------------------------------------------------------------

# Where each run lies, as (index of the run around it or -1, path in it, has a config.toml, where its event files are).
NESTS = st.lists(
    st.tuples(
        st.integers(-1, 5), st.sampled_from(["a", "b/c", "tb/x", "checkpoint", "old"]), st.booleans(),
        st.sampled_from(["tb/20250101-0000", "tb/20250101-0000/rank_0", "tb/s/t"]),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(NESTS)
def test_a_run_inside_another_changes_no_figure_of_it(nests):
    root = Path(tempfile.mkdtemp())
    try:
        runs: dict[Path, float] = {}
        for index, (around, inside, saved, tb) in enumerate(nests):
            outer = list(runs)[around] if 0 <= around < len(runs) else root / "outer"
            path = outer / inside / f"n{index}" if runs else outer
            runs[path] = 0.1 * (index + 1)
            write_run(path, runs[path], steps=range(1, 6), tb=tb, clock=1000.0 + 50 * ((7 * index) % 5))
            if not saved and "rank_" not in tb:
                (path / "config.toml").unlink()
        for path, seconds in runs.items():
            (run,) = c.compare([path], skip=3)[0]
            assert run.step_seconds == pytest.approx(seconds) and run.steps == 5, path
    finally:
        shutil.rmtree(root)


def test_a_folder_around_runs_is_no_run(tmp_path):
    write_run(tmp_path / "outputs" / "deep" / "adamw", 0.5)
    with pytest.raises(c.CompareError, match=r"holds a run in folders of their own; .* e\.g\. .*deep/adamw"):
        c.compare([tmp_path / "outputs"], skip=3)


def test_the_tensorboard_folder_may_have_another_name(tmp_path):
    write_run(tmp_path / "run", 0.5, tb="metrics/x")
    with (tmp_path / "run" / "config.toml").open("a") as file:
        file.write('[metrics]\nsave_tb_folder = "metrics"\n')
    write_run(tmp_path / "run" / "inner", 5.0)
    assert c.compare([tmp_path / "run"], skip=3)[0][0].step_seconds == pytest.approx(0.5)


# --- starts -------------------------------------------------------------------------------------------------------


def test_two_configurations_are_two_rows_and_say_what_changed(tmp_path):
    first = write_run(tmp_path / "adamw", 0.5, more=lr("AdamW"), told=True)
    run = write_run(tmp_path / "run", 0.5, steps=range(1, 9), more=lr("AdamW"), told=True)
    write_run(run, 0.25, steps=range(9, 17), tb="tb/later", clock=9000.0, more=lr("AdamW", "DMuon"), told=True, seq=256)
    runs, notes = c.compare([first, run], skip=3)
    assert [r.name for r in runs] == ["adamw", "run (AdamW, steps 1 to 8)", "run (AdamW+DMuon, steps 9 to 16)"]
    assert [r.ratio for r in runs] == [1.0, pytest.approx(1.0), None]  # the last computed something else
    assert (
        "run was started with another configuration: AdamW+DMuon, steps 9 to 16 has training.seq_len 256 instead of 128"
        in notes
    )
    assert any(n.startswith("no ratio for run (AdamW+DMuon, steps 9 to 16): seq len 256 instead of 128") for n in notes)


def test_without_the_configuration_in_its_files_optimizers_tell_starts_apart(tmp_path):
    run = write_run(tmp_path / "run", 0.5, steps=range(1, 9), more=lr("AdamW"))
    write_run(run, 0.25, steps=range(9, 17), tb="tb/later", clock=9000.0, more=lr("AdamW", "DMuon"))
    runs, notes = c.compare([run], skip=3)
    assert [r.step_seconds for r in runs] == [pytest.approx(0.5), pytest.approx(0.25)]
    assert runs[0].workload == {} and runs[1].workload["seq_len"] == 128  # the file says what the last start was
    assert any("no ratio for run (AdamW" in n for n in notes)


def test_a_configuration_that_began_anew_replaces_nothing_of_another(tmp_path):
    run = write_run(tmp_path / "run", 0.5, told=True, more=lr("AdamW"))
    write_run(run, 0.25, tb="tb/later", clock=9000.0, told=True, more=lr("DMuon"), local=4)
    runs, _ = c.compare([run], skip=3)
    assert [(r.steps, r.step_seconds) for r in runs] == [(12, pytest.approx(0.5)), (12, pytest.approx(0.25))]


def test_another_number_of_steps_is_the_same_configuration(tmp_path):
    run = tmp_path / "run"
    write_run(run, 0.5, steps=range(1, 9), told=True, seq="128\nsteps = 8")
    write_run(run, 0.5, steps=range(9, 17), tb="tb/later", clock=9000.0, told=True, seq="128\nsteps = 16")
    (one,), notes = c.compare([run], skip=3)
    assert one.steps == 16 and any("run was started 2 times" in n for n in notes)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 5000), st.sampled_from([2, 4])),
        min_size=1, max_size=5,
    ),
    st.integers(0, 4),
)  # fmt: skip
def test_steps_of_starts_are_the_last_ones_made_and_time_runs_only_while_they_train(starts, skip):
    """Against the obvious: replay each configuration's starts step by step. (first step, steps, downtime, batch)."""
    root = Path(tempfile.mkdtemp())
    try:
        clock = 1000.0
        expected: dict[int, dict[int, tuple[int, float]]] = {}  # batch -> step -> (start, seconds of the step)
        for index, (first, count, downtime, local) in enumerate(starts):
            clock += downtime
            seconds = 0.5 + index
            mine = expected.setdefault(local, {})
            for step in [s for s in mine if s >= first]:
                del mine[step]
            for step in range(first, first + count):
                mine[step] = (index, seconds)
            more = lambda s, v=seconds: {c.STEP_SECONDS: v, c.LOSS: float(s)}  # noqa: E731
            kind = dict(told=True, local=local, clock=clock, more=more)
            write_run(root / "run", 0.001, steps=range(first, first + count), tb=f"tb/{index}", **kind)
            clock += 100.0
        stretches, notes = run_files.read_stretches(root / "run")
        assert not notes and len(stretches) == len(expected)
        for stretch, made in zip(stretches, expected.values()):
            assert {s: v for s, (_, v) in stretch.series[c.STEP_SECONDS].items()} == {
                s: v for s, (_, v) in sorted(made.items())
            }
            begins = {index: min(s for s, (i, _) in made.items() if i == index) for index, _ in made.values()}
            assert {s for s in made if stretch.warm(s, skip)} == {
                s for s, (i, _) in made.items() if s >= begins[i] + skip
            }
            steps = sorted(made)
            trained = list(stretch.training_seconds(c.LOSS).values())
            assert trained == sorted(trained) and trained[0] == 0
            gaps = sum(made[b][1] * (b - a) for a, b in zip(steps, steps[1:]) if made[a][0] != made[b][0])
            assert trained[-1] <= gaps + 0.011 * len(steps) + 1e-6  # a step of these files takes 10 ms at most
    finally:
        shutil.rmtree(root)


# --- damage -------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["cut", "flip", "zeros", "garbage", "whole", "empty"]))
def test_what_is_read_of_a_damaged_file_was_written_and_the_rest_is_told(seed, damage):
    whole, expected = _whole()
    rng = random.Random(seed)
    at = rng.randrange(len(whole))
    made = {
        "cut": whole[:at],
        "flip": whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :],
        "zeros": whole[:at] + bytes(rng.randrange(1, 200)),
        "garbage": whole[:at] + rng.randbytes(rng.randrange(1, 200)),
        "whole": whole,
        "empty": b"",
    }[damage]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "events.out.tfevents.1.host")
        path.write_bytes(made)
        start, note = run_files._read_file(path)
    series = {} if start is None else {t: {s: v for s, (_, v) in x.items()} for t, x in start.series.items()}
    lost = series != expected
    for tag, values in series.items():
        kept = list(values.items())
        assert kept == list(expected[tag].items())[: len(kept)]
    boundary = damage == "empty" or (damage == "cut" and lost and not note)  # cut between two records: nothing to see
    assert bool(note) or not lost or boundary
    assert not (damage == "whole" and (lost or note))


def _whole(cache: list = []) -> tuple[bytes, dict]:  # noqa: B006  (made once)
    if not cache:
        with tempfile.TemporaryDirectory() as name:
            write_run(Path(name), 0.5, told=True)
            (path,) = run_files.event_files(Path(name))
            start, _ = run_files._read_file(path)
            cache.append((path.read_bytes(), {t: {s: v for s, (_, v) in x.items()} for t, x in start.series.items()}))
    return cache[0]


def test_a_damaged_file_is_told_beside_the_table(tmp_path, capsys):
    run = write_run(tmp_path / "run", 0.5)
    (path,) = run_files.event_files(run)
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    assert c.main([str(run), "--skip", "3"]) == 0
    assert "damaged or not finished after step 12" in capsys.readouterr().out.replace("\n", " ")
    path.write_bytes(data[:10])
    assert c.main([str(run)]) == 2
    assert "hold no scalars" in capsys.readouterr().err


def test_links_are_followed_but_lead_neither_nowhere_nor_in_circles(tmp_path):
    real = write_run(tmp_path / "disk", 0.5)
    run = tmp_path / "run"
    write_config(run)
    (run / "tb").symlink_to(real / "tb", target_is_directory=True)
    (real / "tb" / "events.out.tfevents.9.host").symlink_to(tmp_path / "nowhere")
    (real / "tb" / "up").symlink_to(real / "tb", target_is_directory=True)
    (run / "gone").symlink_to(tmp_path / "nowhere")
    (one,), notes = c.compare([run], skip=3)
    assert one.steps == 12 and not notes


def test_the_configuration_written_by_a_start_is_what_config_toml_holds(tmp_path):
    run = write_run(tmp_path / "run", 0.5, told=True)
    (stretch,), _ = run_files.read_stretches(run)
    assert stretch.starts[0].config == run_files._parsed(
        CONFIG.format(config="llama3_debugmodel", local=2, batch=-1, seq=128, replicas=2, shards=2)
    )
