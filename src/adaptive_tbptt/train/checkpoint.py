"""Checkpoints: one safetensors file each, written atomically. Loading one runs no code from it.

The nest of dicts, lists and numbers around the tensors is JSON, in a tensor of bytes: the header
of a safetensors file must stay small. The metadata hold the SHA-256 of the file, so that one
flipped bit is noticed. Files of version 1 have the nest in the metadata, and no checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .files import replacing, sync

FORMAT = "adaptive-tbptt checkpoint"
VERSION = 2  # raised when an older release could no longer read what this one writes
BLANK = "0" * 64  # what stands for the checksum while it is computed


def require_safetensors() -> None:
    """Raise an ImportError that names the extra if safetensors is not installed."""
    if find_spec("safetensors") is None:
        raise ImportError(
            "checkpoints are safetensors files, and safetensors is not installed: pip install "
            "'adaptive-tbptt[checkpoint]', or train without run_dir"
        )


def save(path: str | Path, nest: Any) -> None:
    """Write a nest of dicts, lists, tuples, numbers, strings and tensors.

    The file gets its name only when it is complete and on disk. If the process is killed at any
    moment before, the previous checkpoint stays.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> save(path, {"weights": torch.ones(2), "steps": [1, (2, 3)], 7: None})
    >>> load(path)
    {'weights': tensor([1., 1.]), 'steps': [1, (2, 3)], 7: None}
    """
    require_safetensors()
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(nest, tensors)).encode()
    tensors["nest"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    meta = {"format": FORMAT, "version": str(VERSION), "sha256": BLANK}
    try:
        with replacing(path) as partial:
            save_file(tensors, partial, meta)
            digest, place = _digest(partial, BLANK)
            with partial.open("r+b") as file:
                file.seek(place)
                file.write(digest.encode())
            sync(partial)  # before the rename: the name must never stand for data still in a cache
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        kept = "; the checkpoint before it is intact" if path.exists() else ""
        raise CheckpointError(f"cannot write {path}: {error}{kept}") from error


def load(path: str | Path) -> Any:
    """Read what `save` wrote; tensors are on the CPU. A damaged file is refused."""
    require_safetensors()
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            if meta.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a checkpoint of adaptive-tbptt")
            version = int(meta["version"])
            if version > VERSION:
                raise CheckpointError(
                    f"{path} has format version {version}, this release reads up to "
                    f"{VERSION}: update adaptive-tbptt"
                )
            if version == 1:
                return _decode(json.loads(meta["nest"]), file.get_tensor)
            if _digest(Path(path), meta["sha256"])[0] != meta["sha256"]:
                raise ValueError("its bytes do not match its checksum")
            text = file.get_tensor("nest").numpy().tobytes()
            return _decode(json.loads(text), file.get_tensor)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except Exception as error:  # what a damaged file raises depends on where the damage is
        raise CheckpointError(
            f"{path} is damaged ({error}): put a copy back in its place, or train again in "
            "another folder. A resumed run writes best.safetensors again"
        ) from error


def load_model(module: torch.nn.Module, saved: dict[str, Tensor], source: str | Path) -> None:
    """Load parameters and buffers into a module.

    If they do not fit, the error lists every difference and the module stays as it was.

    Args:
        module: the module to load into.
        saved: its state dict, from a checkpoint.
        source: where it comes from, for the error.
    """
    own = module.state_dict()
    shapes = [
        f"{name} is {tuple(saved[name].shape)} there and {tuple(own[name].shape)} here"
        for name in sorted(own.keys() & saved.keys())
        if isinstance(own[name], Tensor)  # anything else is the extra state of a module
        and isinstance(saved[name], Tensor)
        and saved[name].shape != own[name].shape
    ]
    problems = [
        *(f"{name} is missing" for name in sorted(own.keys() - saved.keys())),
        *(f"{name} is not part of this model" for name in sorted(saved.keys() - own.keys())),
        *shapes,
    ]
    if problems:
        raise CheckpointError(f"{source} does not fit the model: {'; '.join(problems)}")
    module.load_state_dict(saved)


def _digest(path: Path, stated: str) -> tuple[str, int]:
    """Return the SHA-256 of a file with its stated one left blank, and where that stands."""
    with path.open("rb") as file:
        header = file.read(8)
        header += file.read(int.from_bytes(header, "little"))
        sha = hashlib.sha256(header.replace(stated.encode(), BLANK.encode(), 1))
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest(), header.find(stated.encode())


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # A copy, because safetensors refuses tensors that share memory, as tied parameters do.
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"$tensor": name}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(v, tensors) for v in value]}
    if isinstance(value, list):
        return [_encode(v, tensors) for v in value]
    if isinstance(value, Counter):  # how MultiStepLR holds its milestones
        return {"$counter": _encode(dict(value), tensors)}
    if isinstance(value, dict):
        return {"$dict": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"a checkpoint cannot hold a {type(value).__name__}: only tensors, numbers, strings, None, "
        "and dicts, lists and tuples of them"
    )


def _decode(value: Any, tensor: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensor) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        # A copy in memory that torch aligns. Unaligned, the CPU sums in another order, and the
        # resumed run would differ in the last bits.
        return tensor(value["$tensor"]).clone()
    if "$counter" in value:
        return Counter(_decode(value["$counter"], tensor))
    if "$tuple" in value:
        return tuple(_decode(v, tensor) for v in value["$tuple"])
    return {_decode(k, tensor): _decode(v, tensor) for k, v in value["$dict"]}
