"""What the commands write: never over anything that this package did not make and mark."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from pathlib import Path

import pytest

from tests.test_data import tree
from torchtitan_dmuon import outputs

ROOT = Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / "train_configs/debug_dmuon.toml")
PLAN = [CONFIG, "--world", "4"]

# module -> (arguments of a call, its options that name a file to write)
COMMANDS = {
    "torchtitan_dmuon.compare": (["RUN"], ["--json", "--plot"]),
    "torchtitan_dmuon.plan": (PLAN, ["--json", "--plot", "--calibrate"]),
    "torchtitan_dmuon.simulate": (PLAN, ["--json", "--plot", "--trace"]),
    "scripts.plan_table": ([], ["--json"]),
    "scripts.bench.bytes": ([], ["--json"]),
    "scripts.bench.convergence": ([], ["--json", "--plot"]),
    "scripts.bench.newton_schulz": ([], ["--json", "--plot"]),
    "scripts.bench.predict": (["SWEEP.json"], ["--json"]),
    "scripts.bench.throughput": (["--regime", "a"], ["--json", "--plot"]),
    "scripts.bench.timeline": ([], ["--plot"]),
}
FILES = [(module, option) for module, (_, options) in COMMANDS.items() for option in options]
FOREIGN = {
    "text": b"my notes\n",
    "JSON": b'{"mine": [1, 2, 3]}\n',
    "picture": b"\x89PNG\r\n\x1a\n and pixels",
    "link": b"behind a link",
    "large": b"weights " * 50_000,
    "folder": b"inside",
}


def call(module: str, arguments: list[str]) -> int:
    try:
        return importlib.import_module(module).main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("module, option", FILES, ids=lambda value: value.rpartition(".")[2].strip("-"))
def test_no_command_writes_over_what_is_not_ours(module, option, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, content in FOREIGN.items():
        target = tmp_path / f"{kind}.png"
        if kind == "folder":
            target.mkdir()
            (target / "file").write_bytes(content)
        elif kind == "link":
            (tmp_path / "behind.png").write_bytes(content)
            target.symlink_to(tmp_path / "behind.png")
        else:
            target.write_bytes(content)
    before = tree(tmp_path)
    for kind in FOREIGN:
        assert call(module, [*COMMANDS[module][0], option, f"{kind}.png"]) == 2
        said = capsys.readouterr().err.strip()
        assert len(said.splitlines()) == 1 and f"{kind}.png is " in said, said
        assert kind == "folder" or "--overwrite" in said
        assert tree(tmp_path) == before


def test_every_place_that_writes_is_known():
    """A new place has to go through `outputs`, or be looked at and named here."""
    writes = (
        r"\.write_text\(|\.write_bytes\(|savefig\(|open\([^)]*\"[wax]b?\"|rmtree|\.unlink\(|"
        r"os\.(?:remove|replace)|O_CREAT|export_chrome"
    )
    found = {
        f"{path.relative_to(ROOT)}: {match}"
        for folder in ("torchtitan_dmuon", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        for match in re.findall(writes, path.read_text())
        if path.name != "outputs.py"
    }
    assert found == {
        "torchtitan_dmuon/plan.py: .write_text(",  # costs, refused over any file unless --overwrite
        "torchtitan_dmuon/titan/data.py: .write_text(",  # into a new folder of this process
        'torchtitan_dmuon/titan/convert.py: open("x"',  # refuses a file that exists
        "torchtitan_dmuon/titan/data.py: rmtree",  # of that folder
        'torchtitan_dmuon/titan/platform.py: open("/proc/self/clear_refs", "w"',
        'scripts/bench/memory.py: open("/proc/self/clear_refs", "w"',
        'torchtitan_dmuon/train.py: open(path, "w"',  # the launcher's error file
        "torchtitan_dmuon/local.py: O_CREAT",  # in a temporary folder
        "scripts/bench/convergence.py: .write_text(",  # into a marked folder
        "scripts/bench/convergence.py: O_CREAT",
        "scripts/gpu_check.py: export_chrome",  # into a marked folder
        'scripts/netlab/lab.py: open(pipe, "wb"',
        'scripts/netlab/namespaces.py: open(f"/proc/self/{name}", "w"',
    }


def test_options_that_write_are_all_in_the_table():
    for path in (*(ROOT / "torchtitan_dmuon").glob("*.py"), *(ROOT / "scripts").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text = path.read_text()
        options = set(re.findall(r'add_argument\(\s*"(--[\w-]+)", type=Path', text)) - {"--out"}
        if "add_output_arguments(parser" in text:
            options |= {"--json"} if "picture=False" in text else {"--json", "--plot"}
        if options and path.name != "outputs.py":
            assert options <= set(COMMANDS[module][1]), module


@pytest.mark.parametrize(
    "module, options", [("torchtitan_dmuon.plan", "json plot"), ("torchtitan_dmuon.simulate", "json plot trace")]
)
def test_a_command_writes_over_its_own_and_over_others_when_told(module, options, tmp_path, capsys):
    paths = {option: tmp_path / "new" / f"{option}.png" for option in options.split()}
    command = [*PLAN, *(word for option, path in paths.items() for word in (f"--{option}", str(path)))]
    for _ in range(2):  # the second time over its own
        assert call(module, command) == 0
        assert all(outputs.MARK.encode() in path.read_bytes() for path in paths.values())
    for path in paths.values():
        path.write_bytes(b"mine")
        assert call(module, command) == 2 and path.read_bytes() == b"mine"
    assert call(module, [*command, "--overwrite"]) == 0
    assert all(outputs.MARK.encode() in path.read_bytes() for path in paths.values())


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg", "eps"])
def test_pictures_are_known_for_ours(suffix, tmp_path):
    from matplotlib.figure import Figure

    path = tmp_path / f"a.{suffix}"
    for _ in range(2):
        outputs.prepare_outputs(path)
        outputs.save_picture(Figure(), path, dpi=50)
    path.write_bytes(b"")  # as mktemp leaves it
    outputs.prepare_outputs(path)


def test_two_outputs_in_one_file_and_devices(tmp_path, capfd):
    with pytest.raises(ValueError, match="two outputs"):
        outputs.prepare_outputs(None, tmp_path / "a.json", tmp_path / "b" / ".." / "a.json")
    outputs.prepare_outputs(None, Path("/dev/null"))
    assert call("torchtitan_dmuon.plan", [*PLAN, "--json", "/dev/stdout"]) == 0
    assert json.loads(re.search(r"^\{.*^\}", capfd.readouterr().out, re.S | re.M)[0])["world"] == 4


@pytest.mark.parametrize(
    "held",
    [
        {"config.toml": "[mine]\n"},
        {"config.toml/file": "mine"},
        {"ownership_plan.json": '{"mine": 1}'},
        {"saved.json": '{"mine": 1}'},
    ],
    ids=lambda held: next(iter(held)),
)
def test_a_run_keeps_out_of_files_that_no_run_wrote(held, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchtitan")
    from torchtitan_dmuon import train

    for name, text in held.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = tree(tmp_path)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    flags = ["--dump_folder", str(tmp_path), "--debug.save_config_file", "saved.json"]
    assert train.main(["--config", CONFIG, *flags]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and "is there and no run wrote it" in said and min(held).split("/")[0] in said
    assert tree(tmp_path) == before


def test_a_folder_is_claimed_once_and_only_when_nothing_is_in_it(tmp_path):
    outputs.claim(tmp_path / "a" / "b", "this")
    (tmp_path / "a" / "b" / "result").write_text("ours")
    outputs.claim(tmp_path / "a" / "b", "this")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "note").write_text("mine")
    with pytest.raises(ValueError, match="holds other files .note.*this made"):
        outputs.claim(tmp_path / "c", "this")
    with pytest.raises(ValueError, match="is a file"):
        outputs.claim(tmp_path / "c" / "note", "this")
    assert tree(tmp_path / "c") == {"note": hashlib.sha256(b"mine").hexdigest()}


def test_benches_and_checks_keep_out_of_folders_that_are_not_theirs(tmp_path, monkeypatch, capsys):
    gpu_check = importlib.import_module("scripts.gpu_check")
    (tmp_path / "figures.rank0.json").write_text("mine")
    before = tree(tmp_path)
    for key, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("sys.argv", ["gpu_check.py", str(tmp_path)])
    assert gpu_check.main() == 2 and "holds other files" in capsys.readouterr().err
    convergence = importlib.import_module("scripts.bench.convergence")
    folder = tmp_path / "adamw-0.1-seed0-steps3-every1"
    folder.mkdir()
    (folder / "log.txt").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="holds other files .log.txt"):
        convergence.Runs(tmp_path, 3, 1, 100.0).curve("adamw", 0.1, None, 0)
    assert tree(tmp_path) == before


def test_an_earlier_text_is_kept_under_a_number(tmp_path):
    path = tmp_path / "config.toml"
    assert [outputs.write_keeping(path, text) for text in ("1", "1", "2", "2", "1")] == [
        None,
        None,
        tmp_path / "config-1.toml",
        None,
        tmp_path / "config-2.toml",
    ]
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "config.toml": "1",
        "config-1.toml": "1",
        "config-2.toml": "2",
    }
