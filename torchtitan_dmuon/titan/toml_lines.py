"""On which line of a TOML file each key stands; TOML parsers keep the values only.

Decides: line numbers, for text that a TOML parser has already accepted. Does not parse values and does not report
errors: on text it cannot follow it stops early, and the keys after that have no line.
"""

from __future__ import annotations

import bisect
import contextlib
import re

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"[ \t]*")
_ANY_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRINGS = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]*")

_MAX_PARTS = 32  # of a dotted key: no config is deeper, and every prefix of a key is noted

Path = tuple[str, ...]


def key_lines(text: str) -> dict[Path, int]:
    """``{("training", "steps"): 7, ("optimizer", "param_groups", "0"): 12, ...}``; array items are counted from 0."""
    scanner = _Scanner(text)
    with contextlib.suppress(_LostError):
        scanner.document()
    return scanner.lines


class _LostError(Exception):
    pass


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._breaks = [match.start() for match in re.finditer("\n", text)]
        self.lines: dict[Path, int] = {}
        self._counts: dict[Path, int] = {}  # tables seen of each array of tables

    def document(self) -> None:
        prefix: Path = ()
        while True:
            self.skip(_ANY_SPACE)
            if self.at >= len(self.text):
                return
            if self.text.startswith("[[", self.at):
                prefix = self.header(2)
            elif self.text[self.at] == "[":
                prefix = self.header(1)
            else:
                self.pair(prefix)

    def header(self, brackets: int) -> Path:
        line = self.line()
        self.at += brackets
        path = self.resolve(self.dotted(), is_array=brackets == 2)
        self.skip(_SPACE)
        self.at += brackets
        self.note(path, line)
        return path

    def resolve(self, path: Path, is_array: bool) -> Path:
        """Put the index of the current table behind every array of tables that the path passes."""
        out: Path = ()
        for depth, part in enumerate(path):
            out = (*out, part)
            self.note(out, self.line())
            if is_array and depth == len(path) - 1:
                index = self._counts[out] = self._counts.get(out, -1) + 1
                return (*out, str(index))
            if out in self._counts:
                out = (*out, str(self._counts[out]))
        return out

    def pair(self, prefix: Path) -> None:
        line = self.line()
        path = prefix
        for part in self.dotted():
            path = (*path, part)
            self.note(path, line)
        self.skip(_SPACE)
        self.expect("=")
        self.value(path)

    def value(self, path: Path) -> None:
        self.skip(_SPACE)
        if self.at >= len(self.text):
            raise _LostError
        if self.text[self.at] == "[":
            self.items("]", path)
        elif self.text[self.at] == "{":
            self.items("}", path)
        else:
            match = _STRINGS.match(self.text, self.at) or _SCALAR.match(self.text, self.at)
            if not match or not match[0]:
                raise _LostError
            self.at = match.end()

    def items(self, close: str, path: Path) -> None:
        self.at += 1
        index = 0
        while True:
            self.skip(_ANY_SPACE)
            if self.at >= len(self.text):
                raise _LostError
            if self.text[self.at] == close:
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
            elif close == "}":
                self.pair(path)
            else:
                self.note((*path, str(index)), self.line())
                self.value((*path, str(index)))
                index += 1

    def dotted(self) -> Path:
        parts = []
        while True:
            self.skip(_SPACE)
            if match := _BARE.match(self.text, self.at):
                parts.append(match[0])
            elif match := _STRINGS.match(self.text, self.at):
                parts.append(match[0][1:-1])
            else:
                raise _LostError
            self.at = match.end()
            self.skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return tuple(parts[:_MAX_PARTS])
            self.at += 1

    def note(self, path: Path, line: int) -> None:
        self.lines.setdefault(path, line)

    def line(self) -> int:
        return bisect.bisect_left(self._breaks, self.at) + 1

    def skip(self, pattern: re.Pattern[str]) -> None:
        if match := pattern.match(self.text, self.at):
            self.at = match.end()

    def expect(self, char: str) -> None:
        if not self.text.startswith(char, self.at):
            raise _LostError
        self.at += 1
