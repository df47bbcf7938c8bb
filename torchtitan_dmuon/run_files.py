"""What a run's dump folder holds: its starts, each one TensorBoard event file, and the configuration of each.

Decides: which event files below a folder are the run's own, what can be read of a damaged one, which starts continue
each other, and how training time runs on over a restart. Does not decide any figure (`compare.py`). Keeps: a folder
inside that holds a run of its own is never read, starts of different configurations are never mixed, and what cannot be
read is said.
"""

from __future__ import annotations

import bisect
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG_TAG = "config/text_summary"  # where `train.py` leaves the configuration in an event file
EVENT_FILES = "events.out.tfevents."
# What a run leaves in its dump folder. Two that differ only outside the tables below are one run continued.
_OWN_FILES = ("config.toml", "ownership_plan.json")
_IDENTITY: tuple[str, ...] = (
    "job",
    "training",
    "parallelism",
    "optimizer",
    "lr_scheduler",
    "dataloader",
    "dmuon",
    "compile",
)
_IDENTITY += ("activation_checkpoint", "override")
_STEP_SECONDS = "time_metrics/end_to_end(s)"

Series = dict[int, tuple[float, float]]  # step -> (wall time in seconds, value)


class CompareError(ValueError):
    """A run cannot be read; the message is one line that names the folder and what to do."""


@dataclass
class Start:
    """One event file: what one start of a run wrote."""

    path: Path
    series: dict[str, Series]
    config: dict[str, Any] | None  # None where the file does not say

    @property
    def began(self) -> float:
        return min(time for series in self.series.values() for time, _ in series.values())

    @property
    def first(self) -> int:
        return min(step for series in self.series.values() for step in series)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """By TorchTitan's scalars "lr/NAME" and "lr/NAME/INDEX"."""
        return tuple(sorted({tag.split("/")[1] for tag in self.series if tag.startswith("lr/")}))

    def identity(self) -> dict[str, Any]:
        """Equal for starts that continue each other."""
        if self.config is None:
            return {"optimizers": self.optimizers, "scalars": sorted(t for t in self.series if t.startswith("dmuon/"))}
        told = {key: self.config.get(key) for key in _IDENTITY}
        if isinstance(told["training"], dict):
            told["training"] = {key: value for key, value in told["training"].items() if key != "steps"}
        return told


@dataclass
class Stretch:
    """Starts of one configuration, in time's order: a later one replaces what earlier ones had from its first step on,
    as TensorBoard shows it."""

    starts: list[Start]
    series: dict[str, Series] = field(default_factory=dict)

    def __post_init__(self) -> None:
        firsts: list[int] = []
        for start in self.starts:
            firsts = [first for first in firsts if first < start.first] + [start.first]
            for series in self.series.values():
                for step in [s for s in series if s >= start.first]:
                    del series[step]
            for tag, series in start.series.items():
                self.series.setdefault(tag, {}).update(series)
        self.firsts = firsts  # first logged steps of the starts that are left
        self.series = {tag: dict(sorted(series.items())) for tag, series in self.series.items() if series}

    def warm(self, step: int, skip: int) -> bool:
        """Whether a step comes after the first ``skip`` of its start."""
        return step >= self.firsts[bisect.bisect_right(self.firsts, step) - 1] + skip

    def training_seconds(self, tag: str) -> dict[int, float]:
        """Step -> seconds since the first of this scalar, without the time between a start and the next: there, the
        step seconds that were logged stand for the steps in between."""
        elapsed: dict[int, float] = {}
        total, before = 0.0, None
        for step, (time, _) in self.series[tag].items():
            if before is not None:
                last, last_time = before
                if any(last < first <= step for first in self.firsts):
                    total += self.series.get(_STEP_SECONDS, {}).get(step, (0.0, 0.0))[1] * (step - last)
                else:
                    total += time - last_time
            elapsed[step], before = total, (step, time)
        return elapsed


def read_stretches(run_dir: Path) -> tuple[list[Stretch], list[str]]:
    """The run's starts by configuration, and a line for each file that could not be read whole.

    Raises CompareError when there is nothing to read.
    """
    starts, notes = [], []
    for path in event_files(run_dir):
        start, note = _read_file(path)
        if start is not None:
            starts.append(start)
        if note:
            notes.append(note)
    if not starts:
        damaged = f" ({'; '.join(notes)})" if notes else ""
        raise CompareError(f"{run_dir}: its event files hold no scalars{damaged}")
    starts.sort(key=lambda start: start.began)
    if (run_dir / _OWN_FILES[0]).exists() and starts[-1].config is None:
        starts[-1].config = saved_config(run_dir)  # the last start's: each one writes the file anew
        for earlier in starts[:-1]:  # one configuration as far as their scalars tell
            if earlier.config is None and earlier.optimizers == starts[-1].optimizers:
                earlier.config = starts[-1].config
    alike: list[list[Start]] = []
    for start in starts:
        known = next((group for group in alike if group[0].identity() == start.identity()), None)
        if known is None:
            alike.append(known := [])
        known.append(start)
    return [Stretch(group) for group in alike], notes


def saved_config(run_dir: Path) -> dict[str, Any] | None:
    """The tables of `config.toml` in a dump folder; None where there is none."""
    path = run_dir / _OWN_FILES[0]
    if not path.exists():
        return None
    try:
        return _parsed(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no TOML, or no text
        raise CompareError(f"{path}: {error}") from None


def _parsed(text: str) -> dict[str, Any]:
    import tomli

    return tomli.loads(text)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """ "training.seq_len 256 instead of 128" for each value that ``one`` has and ``other`` has not."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        return [d for k in keys for d in differences(one.get(k), other.get(k), f"{path}.{k}".lstrip("."))]
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return [f"{path} of {len(one)} entries instead of {len(other)}"]
        return [d for i, both in enumerate(zip(one, other)) for d in differences(*both, f"{path}.{i}")]
    return [] if one == other else [f"{path} {one!r} instead of {other!r}"]


# ---- files ----


def event_files(run_dir: Path) -> list[Path]:
    """The run's own event files: those in its TensorBoard folder, or else below it outside of other runs."""
    if not run_dir.is_dir():
        raise CompareError(f"{run_dir}: no such run folder")
    folder = _tensorboard_folder(run_dir)
    found = sorted(_walk(folder)) if folder.is_dir() else []
    found = found or sorted(_walk(run_dir))
    if not found:
        below = sorted(_runs_below(run_dir))
        if below:
            several = "several runs" if len(below) > 1 else "a run"
            named = " ".join(map(str, below[:2]))
            raise CompareError(
                f"{run_dir}: holds {several} in folders of their own; name them one by one, e.g. {named}"
            )
        raise CompareError(
            f"{run_dir}: no TensorBoard event files below it (train with --metrics.enable_tensorboard, and name the "
            "run's dump folder)"
        )
    ranks = {part for path in found for part in path.relative_to(run_dir).parts if part.startswith("rank_")}
    if ranks:  # metrics.save_for_all_ranks: one rank's view is the run's
        lowest = min(ranks, key=lambda r: (len(r), r))
        found = [path for path in found if lowest in path.parts]
    return found


def _tensorboard_folder(run_dir: Path) -> Path:
    metrics = (saved_config(run_dir) or {}).get("metrics")
    named = metrics.get("save_tb_folder") if isinstance(metrics, dict) else None
    return run_dir / (named if isinstance(named, str) else "tb")


def _walk(folder: Path, top: bool = True, seen: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Event files below a folder, without those of runs inside it; links are followed, but in no circle."""
    here = os.path.realpath(folder)
    if here in seen or (not top and _holds_run(folder)):
        return
    for path in _entries(folder):
        if path.is_dir():
            yield from _walk(path, False, seen | {here})
        elif path.name.startswith(EVENT_FILES) and path.is_file():  # no link to nowhere
            yield path


def _holds_run(folder: Path) -> bool:
    if any((folder / name).exists() for name in _OWN_FILES):
        return True
    return (folder / "tb").is_dir() and next(_walk(folder / "tb"), None) is not None


def _runs_below(folder: Path, seen: frozenset[str] = frozenset()) -> Iterator[Path]:
    here = os.path.realpath(folder)
    for path in _entries(folder) if here not in seen else ():
        if path.is_dir():
            if _holds_run(path):
                yield path
            yield from _runs_below(path, seen | {here})


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except PermissionError:
        return []


def _read_file(path: Path) -> tuple[Start | None, str]:
    """What a file holds up to where it is damaged, and a line that says so; None for one without a scalar."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    series: dict[str, Series] = {}
    config = None
    try:
        records = _records(path)
        read = 0
        for event in LegacyEventFileLoader(str(path)).Load():
            read += 1
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    series.setdefault(value.tag, {})[event.step] = (event.wall_time, value.simple_value)
                elif value.tag == CONFIG_TAG and value.tensor.string_val:
                    config = _config_in(value.tensor.string_val[0])
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror}"
    start = Start(path, series, config) if series else None
    if read == records:
        return start, ""
    where = f"after step {max(max(s) for s in series.values())}" if series else "from its beginning"
    return start, f"{path} is damaged or not finished {where}: what follows is left out"


def _config_in(text: bytes) -> dict[str, Any] | None:
    try:
        return _parsed(text.decode())
    except (ValueError, RecursionError):
        return None


def _records(path: Path) -> int:
    """Records of the file by their lengths alone (8 bytes length, 4 checksum, data, 4 checksum); -1 unless they end
    where the file ends. The reader stops without a word at the first that is damaged."""
    size, position, count = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        while position < size:
            file.seek(position)
            header = file.read(8)
            if len(header) < 8:
                return -1
            position += struct.unpack("<Q", header)[0] + 16
            count += 1
    return count if position == size else -1
