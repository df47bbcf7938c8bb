"""Every code block of README.md and docs/*.md, as it is printed.

A block that is not annotated is run or loaded: ```bash``` of `dmuon` commands (exit 0), ```toml``` as a configuration,
```python``` as a program. What cannot be run like that says in an HTML comment before it how it is checked:

    <!-- check: exit N -->           the commands end with code N
    <!-- check: launch -->           trainings: configuration, flags and mesh fit the ranks started, and can be planned
    <!-- check: arguments -->        scripts that take long: they exist, and their parsers take the arguments
    <!-- check: programs N -->       Python: a program of N processes; run with, and without, its last lines that close
    <!-- check: ranks N ... -->      Python: on N ranks, in the page's order, after the lines of the comment
    <!-- check: file NAME -->        written as NAME, for the blocks that follow
    <!-- check: none REASON -->      no code

Any other block fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))]
BLOCK = re.compile(
    r"(?:<!-- check: (?P<check>.*?)-->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)\n *```$", re.S | re.M
)


@dataclass
class Block:
    place: str
    language: str
    check: str  # kind of the annotation, "" without one
    argument: str
    prelude: str
    text: str


def blocks(page: str, text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        first, _, prelude = (match["check"] or "").strip().partition("\n")
        kind, _, argument = first.partition(" ")
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(f"{page}:{line}", match["language"], kind, argument.strip(), prelude, match["text"]))
    fences = len(re.findall(r"^ *```", text, re.M))
    assert fences == 2 * len(found), f"{page}: {fences} fences, {len(found)} blocks"
    return found


def commands(block: Block) -> list[list[str]]:
    """Each command's words; comments left out, lines that end in a backslash joined."""
    lines = block.text.replace("\\\n", " ").replace("$PWD", os.getcwd()).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_commands(block: Block, code: int = 0) -> None:
    from torchtitan_dmuon import cli

    for words in commands(block):
        if words[:3] == ["python", "-m", "torchtitan_dmuon"]:
            words = ["dmuon", *words[3:]]
        assert words[0] == "dmuon", f"{block.place}: {words[0]!r} cannot be run here: annotate the block"
        try:
            ended = cli.main(words[1:])
        except SystemExit as stop:
            ended = stop.code or 0
        assert ended == code, f"{block.place}: {shlex.join(words)} ended with {ended}"


def load_toml(block: Block) -> None:
    """A whole configuration is planned; a part of one is loaded over the debug model's."""
    import tomli

    from torchtitan_dmuon.titan import toml_config

    whole = "job" in tomli.loads(block.text)
    job = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n\n'
    path = Path("block.toml")
    path.write_text(block.text if whole else job + block.text)
    config = toml_config.load(str(path)).config
    if whole:
        mesh = config.parallelism
        plan(config, mesh.data_parallel_replicate_degree * max(1, mesh.data_parallel_shard_degree))


def plan(config, world: int) -> None:
    from torchtitan_dmuon.titan import checks
    from torchtitan_dmuon.titan.config import uses_dmuon
    from torchtitan_dmuon.titan.planning import make_plan

    checks.check_mesh(config, world)
    if uses_dmuon(config):
        make_plan(config, world, min(8, world), "cuda")


def check_launch(block: Block) -> None:
    from torchtitan_dmuon.titan import toml_config

    for words in commands(block):
        env = {}
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        options = dict(re.findall(r"--(nodes|nnodes|nproc-per-node|gpus-per-node)[= ](\d+)", " ".join(words)))
        if words[0] == "sbatch":
            script = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
            assert Path(words[script]).is_file(), block.place
            world = int(options["nodes"]) * int(options.get("gpus-per-node", 8))
            argv = ["--config", env["CONFIG_FILE"], *words[script + 1 :]]
        elif words[0] == "scripts/run_train.sh":
            world, argv = int(env.get("NGPU", 8)), ["--config", env["CONFIG_FILE"], *words[1:]]
        elif words[0] == "torchrun":
            module = words.index("-m")
            assert words[module + 1] == "torchtitan_dmuon.train", block.place
            world, argv = int(options.get("nnodes", 1)) * int(options["nproc-per-node"]), words[module + 2 :]
        else:
            assert words[:3] == ["python", "-m", "torchtitan_dmuon.local"], (
                f"{block.place}: {words[0]!r} launches nothing"
            )
            world, argv = int(words[3]), words[4:]
        plan(toml_config.parse(argv).config, world)


class Parsed(Exception):
    pass


def check_arguments(block: Block, monkeypatch) -> None:
    def parse(self, *args, **kwargs):
        raise Parsed(known(self, *args, **kwargs))

    known = argparse.ArgumentParser.parse_known_args
    for words in commands(block):
        if words[0] == "bash":
            words = words[1:]
        if words[0].endswith(".sh"):
            text = Path(words[0]).read_text()
            subprocess.run(["bash", "-n", words[0]], check=True)
            for option in (word for word in words if word.startswith("--")):
                assert f"{option})" in text, f"{block.place}: {words[0]} has no {option}"
            continue
        assert words[:2] == ["python", "-m"], f"{block.place}: {words[0]!r} has no parser that is known"
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
            with pytest.raises(Parsed) as parsed:
                importlib.import_module(words[2]).main(words[3:])
        assert parsed.value.args[0][1] == [], f"{block.place}: {words[2]} does not know {parsed.value.args[0][1]}"


# One import for all ranks of all variants; each child ends as any interpreter does, which `os._exit` would not show.
FORK = """
import os, runpy, socket, sys
import torch, torch._dynamo, torch.distributed.fsdp, torchtitan_dmuon, torchtitan_dmuon.muon
count, names = int(sys.argv[1]), sys.argv[2:]
pids = {}
for name in names:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(count):
        pid = os.fork()
        if not pid:
            shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
            os.environ.update({key: str(value) for key, value in (shared | dict(RANK=rank, LOCAL_RANK=rank)).items()})
            os.dup2(os.open(f"{name}.{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
            torch.set_num_threads(1)
            runpy.run_path(name, run_name="__main__")
            break
        pids[pid] = name
    else:
        continue
    break
else:
    for _ in range(len(pids)):
        pid, status = os.wait()
        print(pids[pid], os.waitstatus_to_exitcode(status))
"""


def check_programs(block: Block) -> None:
    """As printed, and without what closes at the end: a program that just ends must end well, too."""
    lines = block.text.splitlines()
    closing = [i for i, line in enumerate(lines) if "close()" in line or "destroy_process_group()" in line]
    assert closing == list(range(len(lines) - len(closing), len(lines))), f"{block.place}: ends otherwise"
    variants = {"whole.py": lines, "unclosed.py": lines[: closing[0]], "destroyed.py": lines[: closing[0]] + lines[-1:]}
    for name, text in variants.items():
        Path(name).write_text("\n".join(text))
    done = subprocess.run(
        [sys.executable, "-c", FORK, block.argument, *variants],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=150,
    )
    ended = sorted(done.stdout.split("\n")[:-1])
    said = max((path.read_text() for path in Path().glob("*.err")), key=len)
    assert ended == sorted(f"{n} 0" for n in variants for _ in range(int(block.argument))), f"{ended}\n{said[-3000:]}"


def run_on_ranks(found: list[Block]) -> None:
    def job(rank, world):
        names = {"__name__": "page"}
        for block in found:
            try:
                exec(compile(f"{block.prelude}\n{block.text}", block.place, "exec"), names)
            except Exception as error:
                raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error
        names["owned"].close()

    counts = {int(block.argument) for block in found}
    assert len(counts) == 1
    run_ranks(job, counts.pop(), limit=100)


def check_page(page: str, text: str, monkeypatch) -> int:
    """The number of its blocks; AssertionError or the error of the block that does not hold."""
    on_ranks = []
    found = blocks(page, text)
    for block in found:
        match block.language, block.check:
            case "bash", "" | "exit":
                run_commands(block, int(block.argument or 0))
            case "bash", "launch":
                check_launch(block)
            case "bash", "arguments":
                check_arguments(block, monkeypatch)
            case "toml", "":
                load_toml(block)
            case "python", "programs":
                check_programs(block)
            case "python", "ranks":
                on_ranks.append(block)
            case "python", "":
                exec(compile(block.text, block.place, "exec"), {"__name__": "page"})
            case _, "file":
                Path(block.argument).write_text(block.text)
            case _, "none":
                assert block.argument, f"{block.place}: say why"
            case language, check:
                raise AssertionError(
                    f"{block.place}: no way to check {language or 'a block without a language'} {check!r}"
                )
    if on_ranks:
        run_on_ranks(on_ranks)
    return len(found)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """What the commands see of a clone, as the current folder."""
    pytest.importorskip("torchtitan")
    from torchtitan_dmuon.titan import platform

    platform.prepare()
    for part in ("scripts", "train_configs"):
        shutil.copytree(ROOT / part, tmp_path / part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_every_block_holds(page, clone, monkeypatch):
    text = (ROOT / page).read_text()
    assert check_page(page, text, monkeypatch) == text.count("```") // 2


BAD = {
    "an unknown command": "```bash\nmake all\n```",
    "a training that is not annotated": "```bash\npython -m torchtitan_dmuon.local 4 --config a.toml\n```",
    "a wrong option": "```bash\ndmuon plan train_configs/debug_dmuon.toml --wold 4\n```",
    "a plan that fails": "```bash\ndmuon plan train_configs/none.toml --world 4\n```",
    "another code": "<!-- check: exit 3 -->\n```bash\ndmuon plan train_configs/none.toml --world 4\n```",
    "a mesh of other ranks": "<!-- check: launch -->\n```bash\nNGPU=8 CONFIG_FILE=train_configs/llama3_8b_dmuon.toml "
    "scripts/run_train.sh --training.steps 10\n```",
    "a flag that is none": "<!-- check: launch -->\n```bash\nNGPU=4 CONFIG_FILE=train_configs/debug_dmuon.toml "
    "scripts/run_train.sh --training.step 10\n```",
    "an option that a script lacks": "<!-- check: arguments -->\n```bash\nbash scripts/quickstart.sh --stepz 3\n```",
    "an option that a bench lacks": "<!-- check: arguments -->\n```bash\npython -m scripts.bench.bytes --jsn a\n```",
    "a key that is none": "```toml\n[training]\nstep = 3\n```",
    "no TOML": "```toml\n[training\n```",
    "a name that is none": "```python\nowned.close()\n```",
    "a name that is none, on ranks": "<!-- check: ranks 2\nx = 1\n-->\n```python\ny\n```",
    "no language": "```\ndmuon plan\n```",
    "an unknown language": "```yaml\na: 1\n```",
    "an unknown check": "<!-- check: looks good -->\n```bash\ndmuon plan\n```",
    "no reason": "<!-- check: none -->\n```text\na\n```",
    "an open fence": "```bash\ndmuon plan\n",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_a_block_that_does_not_hold_fails(text, clone, monkeypatch, capfd):
    with pytest.raises((AssertionError, ValueError, SyntaxError, NameError, SystemExit)):
        check_page("page.md", text, monkeypatch)


def test_a_program_that_aborts_fails(clone, monkeypatch):
    text = "<!-- check: programs 1 -->\n```python\nimport os\nos.abort()\ndestroy_process_group()\n```"
    with pytest.raises(AssertionError, match="whole.py -6"):
        check_page("page.md", text, monkeypatch)


def commands_in_text(text: str) -> set[str]:
    """Commands of ours between single backticks, which are not blocks: their options are checked, at least."""
    prose = BLOCK.sub("", text)
    return {
        " ".join(found.split())
        for found in re.findall(r"`([^`]+)`", prose)
        if re.match(r"(python (-m )?scripts[./]|bash scripts/)", found) and "FILE" not in found and "..." not in found
    }


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_text_are_taken_by_their_parsers(page, clone, monkeypatch):
    for command in sorted(commands_in_text((ROOT / page).read_text())):
        words = command.replace("[", "").replace("]", "")
        words = re.sub(r"^python scripts/([\w/]+)\.py", lambda m: f"python -m scripts.{m[1].replace('/', '.')}", words)
        check_arguments(Block(f"{page}: {command}", "bash", "arguments", "", "", words), monkeypatch)
