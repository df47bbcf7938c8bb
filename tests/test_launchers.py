"""Scripts and configurations: what each launcher starts, and that the twins of a model differ in their optimizer."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tomli
import torch

from tests.ranks import run_ranks
from torchtitan_dmuon import local

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "train_configs"
MODELS = ("debug", "llama3_8b", "llama3_70b", "qwen3_32b")
VARIANTS = ("adamw", "gather_muon", "dist_muon", "dmuon")
SCRIPTS = [*sorted(ROOT.glob("scripts/**/*.sh")), ROOT / "scripts/slurm/train.sbatch", ROOT / ".ci/run"]

# Writes "name", then one argument per line, then what it was told to print; a launcher's whole effect.
STUB = """#!/usr/bin/env bash
{{
    printf '%s\\n' "{name}" "$@" "cwd=$PWD"
    env | grep -E '^(OMP_NUM_THREADS|PYTORCH_ALLOC_CONF)='
    echo --
}} >>"$RECORD"
{body}
"""


@pytest.fixture
def stubs(tmp_path):
    """`add(name, body)` puts a recording command on PATH; `calls()` returns what was recorded, in order."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    folder.mkdir(exist_ok=True)

    def add(name: str, body: str = "") -> str:
        path = folder / name
        path.write_text(STUB.format(name=name, body=body))
        path.chmod(0o755)
        return str(path)

    def calls() -> list[list[str]]:
        text = record.read_text() if record.exists() else ""
        return [call.splitlines() for call in text.split("--\n") if call.strip()]

    def run(command, **env):
        kept = {k: v for k, v in os.environ.items() if k in ("HOME", "TMPDIR", "LANG")}
        path = f"{folder}:/usr/local/bin:/usr/bin:/bin"
        return subprocess.run(
            command,
            env=kept | {"PATH": path, "RECORD": str(record), "VENV": str(tmp_path / "no-venv")} | env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return add, calls, run


def flag(call: list[str], name: str) -> str:
    return call[call.index(name) + 1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse_and_name_no_machine(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK) or script.name == "venv.sh"  # sourced, not run
    assert not re.search(r"https?://|index-url", script.read_text())


def test_run_train_has_torchtitans_habits(stubs):
    add, calls, run = stubs
    add("torchrun")
    done = run(
        [str(ROOT / "scripts/run_train.sh"), "--training.steps", "10", "--dump_folder", "a b"],
        NGPU="3",
        CONFIG_FILE="some.toml",
        LOG_RANK="0,2",
    )
    assert done.returncode == 0, done.stderr
    (call,) = calls()
    assert (flag(call, "--nproc-per-node"), flag(call, "--local-ranks-filter")) == ("3", "0,2")
    assert flag(call, "--rdzv-endpoint") == "localhost:0"  # any free port
    module = call.index("-m")
    trainer = ["torchtitan_dmuon.train", "--config", "some.toml", "--training.steps", "10", "--dump_folder", "a b"]
    assert call[module + 1 : module + 1 + len(trainer)] == trainer
    assert "OMP_NUM_THREADS=1" in call


def test_run_train_defaults_registry_and_exit_code(stubs):
    add, calls, run = stubs
    add("torchrun", body="exit 7")
    script = str(ROOT / "scripts/run_train.sh")
    assert run([script]).returncode == 7
    assert run([script], MODULE="llama3", CONFIG="llama3_debugmodel", OMP_NUM_THREADS="4").returncode == 7
    default, registry = calls()
    assert flag(default, "--nproc-per-node") == "8" and Path(flag(default, "--config")).exists()
    assert registry[registry.index("--module") :][:4] == ["--module", "llama3", "--config", "llama3_debugmodel"]
    assert "OMP_NUM_THREADS=4" in registry
    assert run([script], MODULE="llama3").returncode != 0 and len(calls()) == 2  # CONFIG is missing


# What srun is told to run on one node of two, on which `hostname` prints $NAME and $INTERFACES.
SRUN = """
while [ $# -gt 0 ]; do case $1 in -w) shift 2 ;; -*) shift ;; *) break ;; esac; done
export BATCH_PID=$PPID
"$@"
"""
HOSTNAME = """
case $1 in --ip-address) echo "$NAME" ;; --all-ip-addresses) echo "$INTERFACES" ;; *) echo node07 ;; esac
"""


def submit(stubs, *args, **env):
    add, calls, run = stubs
    torchrun = add("torchrun", 'if [ -n "${STEP:-}" ]; then eval "$STEP"; fi; exit "${STEP_RC:-0}"')
    add("srun", SRUN)
    add("hostname", HOSTNAME)
    add("scontrol", "printf 'node07\\nnode08\\n'")
    shutil.copytree(CONFIGS, Path(torchrun).parent.parent / "train_configs", dirs_exist_ok=True)
    allocation = dict(SLURM_JOB_ID="4711", SLURM_JOB_NODELIST="node[07-08]", SLURM_JOB_NUM_NODES="2")
    allocation |= dict(NAME="127.0.1.1", INTERFACES="10.1.2.3 fe80::1")
    return run(["bash", str(ROOT / "scripts/slurm/train.sbatch"), *args], **allocation | env), calls()


def test_slurm_meets_at_the_head_node(stubs, tmp_path):
    done, calls = submit(stubs, "--training.steps", "5", SLURM_GPUS_ON_NODE="4", SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    address, preflight, job = (call for call in calls if call[0] == "srun")
    assert flag(address, "-w") == "node07"
    assert "--cpu-bind=none" in job and "--kill-on-bad-exit=1" in job and "--kill-on-bad-exit=1" in preflight
    assert "--output=outputs/slurm-4711/%N.log" in job and "--open-mode=append" in job  # a job may be queued again
    assert (tmp_path / "outputs/slurm-4711").is_dir()
    (job,) = (call for call in calls if call[0] == "torchrun")
    assert (flag(job, "--nnodes"), flag(job, "--nproc-per-node"), flag(job, "--rdzv-id")) == ("2", "4", "4711")
    assert flag(job, "--rdzv-endpoint") == f"10.1.2.3:{29500 + 711}" and flag(job, "--local-addr") == "10.1.2.3"
    assert flag(job, "--rdzv-conf") == "is_host=1"
    _, calls = submit(stubs, SLURM_NODEID="1")
    assert flag([call for call in calls if call[0] == "torchrun"][-1], "--rdzv-conf") == "is_host=0"
    assert job[job.index("-m") + 1 :][:5] == [
        "torchtitan_dmuon.train",
        "--config",
        "train_configs/llama3_8b_dmuon.toml",
        "--training.steps",
        "5",
    ]


@pytest.mark.parametrize(
    "name, interfaces, nodes, given, found",
    [
        ("10.1.2.3", "10.1.2.3", 2, "", "10.1.2.3"),
        ("127.0.1.1", "10.1.2.3 172.17.0.1 fe80::1", 2, "", "10.1.2.3"),  # Debian
        ("127.0.1.1 10.9.9.9 fe80::1", "10.1.2.3", 2, "", "10.9.9.9"),
        ("::1 fe80::1", "10.1.2.3", 2, "", "10.1.2.3"),
        ("127.0.1.1", "", 2, "", None),
        ("127.0.1.1", "fe80::1", 32, "", None),
        ("", "", 2, "", None),
        ("127.0.1.1", "", 1, "", "127.0.0.1"),  # one machine alone
        ("10.1.2.3", "10.1.2.3", 2, "192.168.7.1", "192.168.7.1"),
        ("127.0.1.1", "", 2, "127.0.0.1", "127.0.0.1"),  # two nodes of a test on one machine
    ],
)
def test_slurm_takes_an_address_that_others_reach(name, interfaces, nodes, given, found, stubs):
    env = dict(NAME=name, INTERFACES=interfaces, HEAD_ADDRESS=given, SLURM_JOB_NUM_NODES=str(nodes))
    done, calls = submit(stubs, **env)  # HEAD_ADDRESS empty: as if it were not set
    jobs = [call for call in calls if call[0] == "torchrun"]
    if found is None:
        assert done.returncode == 2 and not jobs and len(done.stderr.strip().splitlines()) == 1
        assert "node07" in done.stderr and "set HEAD_ADDRESS" in done.stderr
    else:
        assert done.returncode == 0 and flag(jobs[0], "--rdzv-endpoint").split(":")[0] == found


def test_slurm_fails_early_in_words_and_passes_failures_on(stubs):
    done, calls = submit(stubs, CONFIG_FILE="nothing.toml")
    assert done.returncode == 2 and "nothing.toml" in done.stderr and not calls
    done, calls = submit(stubs, TORCHRUN="/no/torchrun")
    assert done.returncode == 2 and "node07: no launcher /no/torchrun" in done.stderr
    stubs[0]("nvidia-smi", "printf 'GPU 0\\nGPU 1\\n'")
    done, calls = submit(stubs, GPUS_PER_NODE="4")
    assert done.returncode == 2 and "node07: 2 GPUs, but 4 processes" in done.stderr
    assert not [call for call in calls if call[0] == "torchrun"]
    done, calls = submit(stubs, GPUS_PER_NODE="2", STEP_RC="3", SRUN_ARGS="--container-image=a --mpi=none")
    assert done.returncode == 3 and "10.1.2.3" in done.stdout
    (job,) = (call for call in calls if call[0] == "srun" and "--container-image=a" in call and "launch" in call)
    assert "--mpi=none" in job


@pytest.mark.parametrize("requeue", ["0", "1"])
def test_slurm_queues_again_before_time_is_up_where_asked(requeue, stubs):
    """Slurm signals the batch script alone (--signal=B:USR1); the ranks go on until the job ends."""
    body = "kill -USR1 $BATCH_PID; sleep 0.3; exit 5"
    done, calls = submit(stubs, REQUEUE=requeue, STEP=body)
    assert done.returncode == 5 and "time is nearly up" in done.stdout
    asked = [call[1:3] for call in calls if call[0] == "scontrol"][1:]
    assert asked == ([["requeue", "4711"]] if requeue == "1" else [])


@pytest.mark.parametrize(
    "rank, master, listening, said",
    [
        (
            2,
            "127.0.0.1",
            False,
            "MASTER_ADDR = '127.0.0.1' in the environment is this node itself, where nothing listens",
        ),
        (2, "localhost", False, "this node itself"),
        (2, "127.0.1.1", False, "this node itself"),
        (2, "no.such.host.invalid", False, "is not known on this node"),
        (2, "127.0.0.1", True, None),  # nodes emulated on one machine
        (1, "127.0.1.1", False, None),  # on rank 0's node
        (2, "192.0.2.1", False, None),  # another machine: torch's own timeouts
    ],
)
def test_a_node_whose_master_is_itself_ends_in_words(rank, master, listening, said, monkeypatch):
    pytest.importorskip("torchtitan")
    from torchtitan_dmuon import train

    monkeypatch.setattr(train, "_MASTER_WAIT_SECONDS", 0.3)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()
        values = dict(RANK=rank, WORLD_SIZE=4, LOCAL_RANK=rank % 2, LOCAL_WORLD_SIZE=2, MASTER_ADDR=master)
        for name, value in (values | {"MASTER_PORT": server.getsockname()[1]}).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(train.ConfigError, match=re.escape(said)) if said else contextlib.nullcontext():
            train._default_environment()


@pytest.fixture
def fake_clone(tmp_path):
    """A clone whose .venv is already installed: its python records what it is asked to run."""
    clone = tmp_path / "clone"
    for part in ("scripts", ".ci", "train_configs"):
        shutil.copytree(ROOT / part, clone / part)
    shutil.copy(ROOT / "pyproject.toml", clone)
    interpreter = tmp_path / "bin" / "made-python"
    interpreter.parent.mkdir(exist_ok=True)
    # `python -c version check` and `python -m venv DIR` behave; everything else is recorded.
    interpreter.write_text(
        STUB.format(
            name="python",
            body=f"""
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/torchrun" ;;
  "-c "*) exec {sys.executable} "$@" ;;
  "-m pip") exit "${{PIP_RC:-0}}" ;;
  "- ") cat >/dev/null; echo "${{LAUNCHER:-torchrun}} 4 2 2 ${{DTYPE:-bfloat16}}" ;;
  "-m torchtitan_dmuon.local") printf "INFO - step:  1  loss: 7.5\\nINFO - step:  2  loss: 7.4\\n"; exit 0 ;;
  "--version "*) echo "Python 3.99" ;;
esac
if [ "${{0##*/}}" = torchrun ]; then
  printf '[rank1]: INFO - step:  1  loss: 9.9 [rank0]: INFO - step:  1  loss: 7.5[rank1]: more\\n'
  printf '[rank0]: INFO - step:  2  loss: 7.4\\n[rank1]: INFO - step:  2  loss: 9.9\\n'
  echo "[rank1]: error: why"
  exit "${{TRAIN_RC:-0}}"
fi
""",
        )
    )
    interpreter.chmod(0o755)
    return clone, str(interpreter)


def test_test_script_installs_once_and_passes_arguments_on(fake_clone, stubs):
    clone, interpreter = fake_clone
    _, calls, run = stubs
    env = dict(PYTHON=interpreter, VENV=str(clone / ".venv"))
    for _ in range(2):
        done = run(["bash", str(clone / "scripts/test.sh"), "tests/x.py", "-k", "a b"], **env)
        assert done.returncode == 0, done.stderr
    made = [call[1:] for call in calls()]
    assert sum(call[:2] == ["-m", "pip"] for call in made) == 1  # the second run reuses it
    assert sum(call[:2] == ["-m", "venv"] for call in made) == 1
    tests = [call for call in made if call[:2] == ["-m", "pytest"]]
    assert len(tests) == 2 and tests[0][2:5] == ["tests/x.py", "-k", "a b"]
    assert f"cwd={clone}" in tests[0] and "OMP_NUM_THREADS=1" in tests[0]
    # A changed pyproject.toml is installed again; .ci/run is the same script.
    (clone / "pyproject.toml").write_text((clone / "pyproject.toml").read_text() + "\n")
    assert run(["bash", str(clone / ".ci/run")], **env).returncode == 0
    assert sum(call[1:3] == ["-m", "pip"] for call in calls()) == 2


def test_a_failed_installation_is_tried_again(fake_clone, stubs):
    clone, interpreter = fake_clone
    _, calls, run = stubs
    env = dict(PYTHON=interpreter, VENV=str(clone / ".venv"))
    assert run(["bash", str(clone / "scripts/test.sh")], **env, PIP_RC="1").returncode == 1
    assert run(["bash", str(clone / "scripts/test.sh")], **env).returncode == 0
    assert sum(call[1:3] == ["-m", "pip"] for call in calls()) == 2
    assert not any("pytest" in call for call in calls()[:2])


def test_an_old_python_is_refused(fake_clone, stubs):
    clone, _ = fake_clone
    add, _, run = stubs
    old = add("old-python", "exit 1")
    done = run(["bash", str(clone / "scripts/test.sh")], PYTHON=old, VENV=str(clone / ".venv"))
    assert done.returncode == 2 and "older than Python 3.11" in done.stderr


def test_no_environment_is_made_among_other_files(fake_clone, stubs):
    clone, interpreter = fake_clone
    _, calls, run = stubs
    (clone / "mine").mkdir()
    (clone / "mine" / "notes.txt").write_text("mine")
    done = run(["bash", str(clone / "scripts/test.sh")], PYTHON=interpreter, VENV=str(clone / "mine"))
    assert done.returncode == 2 and "mine holds other files" in done.stderr
    assert not [call for call in calls() if "venv" in call] and len(list((clone / "mine").iterdir())) == 1


def test_quickstart_forks_its_ranks_where_there_is_no_gpu(fake_clone, stubs, tmp_path):
    clone, interpreter = fake_clone
    _, calls, run = stubs
    env = dict(PYTHON=interpreter, VENV=str(clone / ".venv"), LAUNCHER="fork")
    done = run(["bash", str(clone / "scripts/quickstart.sh"), "--out", str(tmp_path / "out")], **env)
    assert done.returncode == 0, done.stderr
    runs = [call for call in calls() if "torchtitan_dmuon.local" in call]
    assert len(runs) == 4 and all(r[r.index("torchtitan_dmuon.local") + 1] == "4" for r in runs)
    assert [Path(flag(r, "--config")).name for r in runs] == [f"debug_{v}.toml" for v in VARIANTS]
    assert done.stdout.count("  step:  1  loss: 7.5\n") == done.stdout.count("step:  2  loss: 7.4\n") == 4


def test_quickstart_leaves_dist_muon_out_where_bf16_is_emulated(fake_clone, stubs, tmp_path):
    clone, interpreter = fake_clone
    _, calls, run = stubs
    env = dict(PYTHON=interpreter, VENV=str(clone / ".venv"), LAUNCHER="fork", DTYPE="float32")
    done = run(["bash", str(clone / "scripts/quickstart.sh"), "--out", str(tmp_path / "out")], **env)
    assert done.returncode == 0 and "dist_muon is left out" in done.stdout
    (compare,) = [call for call in calls() if "compare" in call]
    assert compare[4:7] == [str(tmp_path / "out" / v) for v in VARIANTS if v != "dist_muon"]


def test_quickstart_trains_all_alike_and_compares(fake_clone, stubs, tmp_path):
    clone, interpreter = fake_clone
    _, calls, run = stubs
    env = dict(PYTHON=interpreter, VENV=str(clone / ".venv"))
    out = tmp_path / "my out"
    (out / "dmuon" / "checkpoint").mkdir(parents=True)
    for folder in (out, out / "dmuon"):
        (folder / ".torchtitan_dmuon").touch()
    command = ["bash", str(clone / "scripts/quickstart.sh"), "--steps", "12", "--out", "my out"]
    done = run(command, **env)
    assert done.returncode == 0, done.stderr
    assert not (out / "dmuon" / "checkpoint").exists()  # it would be resumed instead of trained
    runs = [call for call in calls() if "torchtitan_dmuon.train" in call]
    assert [Path(flag(r, "--dump_folder")).name for r in runs] == list(VARIANTS)
    assert {str(Path(flag(r, "--dump_folder")).parent) for r in runs} == {str(out)}
    assert [Path(flag(r, "--config")).name for r in runs] == [f"debug_{v}.toml" for v in VARIANTS]
    alike = [[a for a in r if a not in (flag(r, "--dump_folder"), flag(r, "--config"))] for r in runs]
    assert all(a == alike[0] for a in alike)  # the same mesh, steps and precision
    assert "--validator.enable" in runs[0] and flag(runs[0], "--validator.freq") == "4"  # the last step is one of them
    assert flag(runs[0], "--parallelism.data_parallel_shard_degree") == "2" and "--checkpoint.enable" in runs[0]
    (compare,) = [call for call in calls() if "compare" in call]
    assert compare[4:8] == [str(out / v) for v in VARIANTS] and flag(compare, "--skip") == "5"
    assert done.stdout.count("  step:  1  loss: 7.5\n") == done.stdout.count("step:  2  loss: 7.4\n") == 4
    assert "9.9" not in done.stdout and "more" not in done.stdout and (out / "adamw/train.log").read_text()

    done = run(command, **env, TRAIN_RC="9")
    assert done.returncode == 1 and "adamw failed" in done.stderr and "error: why" in done.stderr
    for wrong in (["--steps", "0"], ["--steps", "x"], ["--stepz"]):
        assert run([*command[:2], *wrong], **env).returncode == 2


@pytest.mark.parametrize(
    "held, marked",
    [
        ({"notes.txt": "mine"}, []),
        ({"dmuon/checkpoint/weights": "mine"}, []),
        ({"dmuon/checkpoint/weights": "mine"}, ["."]),
        ({"adamw/notes.txt": "mine"}, [".", "adamw"]),
    ],
)
def test_quickstart_removes_nothing_that_it_did_not_make(held, marked, fake_clone, stubs, tmp_path):
    clone, interpreter = fake_clone
    _, _, run = stubs
    out = tmp_path / "out"
    for name, text in held.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    for name in marked:
        (out / name / ".torchtitan_dmuon").touch()
    env = dict(PYTHON=interpreter, VENV=str(clone / ".venv"))
    done = run(["bash", str(clone / "scripts/quickstart.sh"), "--out", str(out)], **env)
    assert done.returncode == 2, done.stderr
    assert "is left as it is" in done.stderr or "is not of a quickstart" in done.stderr
    assert {name: (out / name).read_text() for name in held} == held


def read(model: str, variant: str) -> dict:
    return tomli.loads((CONFIGS / f"{model}_{variant}.toml").read_text())


def test_every_model_has_its_twins_and_nothing_else():
    assert {p.name for p in CONFIGS.glob("*.toml")} == {f"{m}_{v}.toml" for m in MODELS for v in VARIANTS}


@pytest.mark.parametrize("model", MODELS)
def test_twins_differ_in_the_optimizer_tables_alone(model):
    adamw, *muons = (read(model, v) for v in VARIANTS)
    folders = [twin.pop("dump_folder") for twin in (adamw, *muons)]
    assert folders == [f"./outputs/{model}_{variant}" for variant in VARIANTS]  # none resumes or replaces another's run
    groups = [twin["optimizer"].pop("param_groups") for twin in (adamw, *muons)]
    dmuon = muons[-1].pop("dmuon", None)
    assert dmuon == ({"holders": "node"} if model in ("llama3_70b", "qwen3_32b") else None)
    assert all(twin == adamw for twin in muons)
    assert [g["optimizer_name"] for g in groups[0]] == ["AdamW"]
    assert all(g[1:] == groups[0] for g in groups[1:])  # the rest is AdamW's alike
    assert [g[0].pop("optimizer_name") for g in groups[1:]] == ["GatherMuon", "DistMuon", "DMuon"]
    gather_first = groups[1][0]
    assert all(g[0] == gather_first for g in groups[2:])
    # match_rms_adamw scales Muon's step to AdamW's of a long run; thirty steps from nothing want more.
    same_rate = gather_first["optimizer_kwargs"]["lr"] == groups[0][0]["optimizer_kwargs"]["lr"]
    assert same_rate == (model != "debug")


# Matrices of a block: q, k, v (one fused weight), wo, w1, w2, w3.
@pytest.mark.parametrize(
    "model, world, blocks", [("debug", 4, 6), ("llama3_8b", 256, 32), ("llama3_70b", 512, 80), ("qwen3_32b", 256, 64)]
)
def test_configurations_load_build_and_plan(model, world, blocks, monkeypatch):
    """Against the installed TorchTitan: names, types, a model built on the meta device, every matrix with an owner."""
    pytest.importorskip("torchtitan")
    from torchtitan_dmuon.matrices import canonical_name, count_matrices
    from torchtitan_dmuon.ownership import MeshSpec, assign
    from torchtitan_dmuon.titan import checks, platform, toml_config

    platform.prepare()
    monkeypatch.setenv("RANK", "0")
    from torchtitan_dmuon.titan.models import owned_specs

    for variant in VARIANTS:
        config = toml_config.load(str(CONFIGS / f"{model}_{variant}.toml")).config
        mesh = config.parallelism
        assert mesh.data_parallel_replicate_degree * mesh.data_parallel_shard_degree == world
        for index, group in enumerate(config.optimizer.param_groups):
            checks.check_optimizer_kwargs(group.optimizer_name, group.optimizer_kwargs, str(index))
    assignment = checks.check_run(config, world)  # DMuon's: the twins have the same patterns
    built = checks.meta_model(config)
    shapes = {canonical_name(name): parameter.shape for name, parameter in built.named_parameters()}
    wanted = {name for name, shape in shapes.items() if name.startswith("layers.") and len(shape) >= 2}
    assert wanted and set(assignment.groups[0]) == wanted
    assert {name for name, _ in assignment.fell_through} == {n for n in shapes if re.search(r"attention\.[qk]_norm", n)}

    pieces = [piece for spec in owned_specs(built, wanted) for piece in spec.pieces()]
    plan = assign(pieces, MeshSpec(world, mesh.data_parallel_shard_degree, min(8, world)))
    assert count_matrices(plan.pieces) == 7 * blocks
    assert {name for rank in range(world) for name in (p.name for p in plan.pieces_of(rank))} == wanted


def test_configuration_page_has_every_key():
    import dataclasses
    import inspect

    from torchtitan_dmuon.muon import Muon
    from torchtitan_dmuon.titan.config import DMuonConfig
    from torchtitan_dmuon.titan.names import LAYOUT_OPTIONS

    page = (ROOT / "docs/configuration.md").read_text()
    optimizer, dmuon = page.split("## `[dmuon]`")
    keys = {field.name for field in dataclasses.fields(DMuonConfig)}
    assert set(re.findall(r"^\| `(\w+)` \|", dmuon, flags=re.M)) == keys
    arguments = set(inspect.signature(Muon.__init__).parameters) - {"self", "params"}
    table = optimizer.split("### Arguments")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.M)) == arguments | set(LAYOUT_OPTIONS)


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md", "docs/recipes.md"])
def test_pages_name_files_that_exist(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"\b((?:scripts|train_configs|torchtitan_dmuon|docs)/[\w./-]*\w)", text):
        assert (ROOT / name).exists() or name.endswith("FILE.toml"), name


def test_forked_ranks_end_together_and_say_whose_fault_it_was(tmp_path):
    """`torchtitan_dmuon.local`: a rank that dies ends the others and is named, and so does a signal, however early."""

    def run(arguments):
        rank = int(os.environ["RANK"])
        if arguments == ["dies"] and rank == 2:
            os.write(1, b"rank two speaks\n")
            os._exit(7)
        if arguments == ["is killed"] and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if arguments != ["ends"]:
            time.sleep(60)
        assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "3"
        return 0

    def launch(rank, world):
        tempfile.tempdir = str(tmp_path)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        fork, said = local._fork, io.StringIO()

        def signalled(*arguments):  # as early as it can come: the folder exists, no rank does
            os.kill(os.getpid(), signal.SIGHUP)
            return fork(*arguments)

        local._fork = signalled
        with pytest.raises(SystemExit) as ended:
            local._launch(3, ["is ended"], run)
        local._fork = fork
        with contextlib.redirect_stderr(said):
            codes = [local._launch(3, [what], run) for what in ("ends", "dies", "is killed")]
        return [ended.value.code, *codes], said.getvalue().splitlines()

    ((codes, said),) = run_ranks(launch, 1, init=False, limit=50)  # a process of its own: it sets signals
    assert codes == [128 + signal.SIGHUP, 0, 7, 128 + signal.SIGKILL] and os.listdir(tmp_path) == []
    assert said == [
        "rank 2 ended with code 7; the end of its log:",
        "rank two speaks",
        "rank 0 was ended by SIGKILL; its log is above",
    ]


def test_the_port_of_forked_ranks_is_taken_before_they_start():
    def run(arguments):
        try:
            socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()  # as another program would
        except OSError:
            torch.distributed.init_process_group("gloo")
            torch.distributed.destroy_process_group()
            return 0
        return 7

    assert local._launch(2, [], run) == 0
