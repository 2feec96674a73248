"""Text files of run folders: written whole or not at all, read as JSON lines or TOML."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DamagedFileError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name to write to; rename that file at the end, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process id keeps two writers from sharing one half-written file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # a link planted there would lead the writer elsewhere
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all; its folder is created if need be."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def append_line(path: Path, text: str) -> None:
    """Add a line to a file, which may not be a symbolic link to another."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
        file.write(f"{text}\n")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; see `each_row`."""
    return list(each_row(path))


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of JSON lines one by one.

    A last line that is not JSON is skipped: another process may still be writing it.
    """
    if not path.is_file():
        return
    bad = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if bad:
                raise DamagedFileError(f"line {bad} of {path} is not JSON: remove or repair it")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # no JSON, or no text
                bad = number
                continue
            if not isinstance(row, dict):
                raise DamagedFileError(
                    f"line {number} of {path} is not a JSON object: remove or repair it"
                )
            yield row


def short_number(value: Any) -> Any:
    """Round a float to five digits, which keeps files small; other values stay as they are.

    NaN and infinities become None, because JSON has neither.

    >>> short_number(1.23456789), short_number(float("nan")), short_number(7)
    (1.2346, None, 7)
    """
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; an error names the file."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DamagedFileError(f"{path} cannot be read: {error}. Repair the file") from None
