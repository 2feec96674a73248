"""Files that are either whole or not there, and what is written into them."""

from __future__ import annotations

import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that no reader sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines; a last line that is still being written does not count."""
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise ValueError(f"line {number} of {path} is not JSON") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {path} is not a JSON object")
        rows.append(row)
    return rows


def short_number(value: Any) -> Any:
    """Return a float in five digits, which keeps files small, or None where it is not finite."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of TOML, or say which one is none."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
