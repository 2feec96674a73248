"""A damaged checkpoint is refused by name; one from before checksums still loads."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file

from adaptive_tbptt.errors import CheckpointError
from adaptive_tbptt.loop.estimates import Estimate
from adaptive_tbptt.train import checkpoint

from ..small_run import build, final, streams

MUTATIONS = 300


def mutate(data, dice):
    """Flip a bit, overwrite a stretch, cut off the end, drop or repeat a stretch."""
    at, length = dice.randrange(len(data)), dice.randint(1, 64)
    kind = dice.randrange(5)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + dice.randbytes(length) + data[at + length :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + data[at + length :]
    return data[:at] + data[at : at + length] + data[at:]


def test_every_mutation_of_a_checkpoint_is_refused_by_name(uninterrupted, tmp_path):
    data = (uninterrupted[0] / "checkpoints" / "last.safetensors").read_bytes()
    path, dice, refused = tmp_path / "last.safetensors", random.Random(0), 0
    header = int.from_bytes(data[:8], "little")
    for turn in range(MUTATIONS):
        if turn % 2:  # half of them in the header, which is a small part of the file
            damaged = mutate(data[: 8 + header], dice) + data[8 + header :]
        else:
            damaged = mutate(data, dice)
        if damaged == data:
            continue
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"last\.safetensors"):
            checkpoint.load(path)
        refused += 1
    print(f"{refused} mutations of a checkpoint, {refused} refused")
    assert refused > 0.95 * MUTATIONS


def test_a_damaged_checkpoint_stops_a_resume_and_changes_nothing(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0], tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "last.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = {p: p.read_bytes() for p in (tmp_path / "run").glob("**/*.*") if p.is_file()}
    with pytest.raises(
        CheckpointError, match=r"last\.safetensors is damaged .*checksum.*copy back"
    ):
        build(tmp_path / "run").fit(*streams(), epochs=4, resume=True)
    assert all(p.read_bytes() == content for p, content in before.items())


def write_version_1(path, nest):
    """Write a checkpoint as releases before the checksum did."""
    if "tbptt" in nest:
        past = nest["tbptt"]["history"]
        rows = [dict(zip(past, values, strict=True)) for values in zip(*past.values(), strict=True)]
        nest["tbptt"]["history"] = rows
        nest["history"] = [{k: v for k, v in r.items() if k != "step"} for r in nest["history"]]
    tensors = {}
    text = json.dumps(checkpoint._encode(nest, tensors))
    save_file(tensors, path, {"format": checkpoint.FORMAT, "version": "1", "nest": text})


def test_checkpoints_from_before_resume_bit_for_bit(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    build(folder).fit(*streams(), epochs=2)
    path = folder / "checkpoints" / "last.safetensors"
    write_version_1(path, checkpoint.load(path))
    trainer = build(folder)
    trainer.fit(*streams(), epochs=3, resume=True)
    expected = final(uninterrupted[1])
    assert all(torch.equal(v, expected[k]) for k, v in final(trainer).items())
    assert trainer.tbptt.history == uninterrupted[1].tbptt.history


def test_damage_of_a_checkpoint_without_checksum_names_the_file(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted[0], folder)
    path = folder / "checkpoints" / "last.safetensors"
    saved = checkpoint.load(path)
    write_version_1(path, saved)
    path.write_bytes(path.read_bytes().replace(b'\\"progress\\"', b'\\"progress\\";', 1)[:-1])
    with pytest.raises(CheckpointError, match=r"last\.safetensors is damaged \(.*copy"):
        checkpoint.load(path)
    write_version_1(path, {"settings": saved["settings"], "model": saved["model"]})
    with pytest.raises(CheckpointError, match=r"last\.safetensors does not hold a whole run"):
        build(folder).fit(*streams(), epochs=4, resume=True)


def test_a_long_history_stays_out_of_the_header(tmp_path):
    trainer = build(tmp_path)
    train, _ = streams()
    entry = Estimate(7, 12, 0.5, 0.25, "MET", "K = 12 meets delta = 0.3 " * 4)
    trainer.tbptt.history = [entry] * 20_000
    trainer.fit(train, epochs=1)
    path = tmp_path / "checkpoints" / "last.safetensors"
    with path.open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 100_000
    again = build(tmp_path)
    again.fit(train, epochs=1, resume=True)
    assert again.tbptt.history == trainer.tbptt.history


def test_a_resumed_run_writes_the_best_weights_again(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0], tmp_path / "run")
    best = tmp_path / "run" / "checkpoints" / "best.safetensors"
    expected = checkpoint.load(best)
    best.write_bytes(best.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"best\.safetensors is damaged.*writes best"):
        checkpoint.load(best)
    build(tmp_path / "run").fit(*streams(), epochs=3, resume=True)
    found = checkpoint.load(best)
    assert all(torch.equal(found[k], v) for k, v in expected.items())
