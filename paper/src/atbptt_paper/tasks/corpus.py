"""Text to token numbers: a vocabulary, and splits encoded once into memory-mapped files.

Text is read line by line, never as a whole, so a corpus may be far larger than memory. A line ends
with the token `<eos>`; words are what white space separates.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "valid", "test")


EOS, UNKNOWN = "<eos>", "<unk>"


Level = Literal["word", "char"]


Scope = Literal["train", "all"]


class Source(NamedTuple):
    """Where a data set comes from, and how many tokens its splits have."""

    origin: str
    tokens: dict[str, int]


SOURCES: dict[str, Source] = {
    "ptb": Source(
        "the Penn Treebank as preprocessed by Mikolov (ptb.train.txt, ptb.valid.txt and "
        "ptb.test.txt of his simple-examples archive)",
        {"train": 929_589, "valid": 73_760, "test": 82_430},
    ),
    "wikitext-2": Source(
        "WikiText-2, word level (wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens)",
        {"train": 2_088_628, "valid": 217_646, "test": 245_569},
    ),
}


@dataclass(frozen=True)
class Corpus:
    """Encoded splits and what their numbers mean.

    Attributes:
        tokens: one array of token numbers per split, memory-mapped.
        words: the vocabulary; a token's number is its place in it.
        level: what a token is.
    """

    tokens: dict[str, NDArray[np.int32]]
    words: list[str]
    level: Level = "word"

    def decode(self, numbers: Iterable[int]) -> str:
        """Turn numbers back into text."""
        between = " " if self.level == "word" else ""
        return between.join(self.words[i] for i in numbers)


def read_corpus(
    folder: str | Path,
    cache: str | Path,
    *,
    level: Level = "word",
    scope: Scope = "train",
    limits: dict[str, int] | None = None,
    dataset: str = "text",
    partial: bool = False,
) -> Corpus:
    """Read `train.txt`, `valid.txt` and `test.txt` of a folder; the second time from the cache.

    Args:
        folder: where the text is.
        cache: where encoded splits are kept; they are made anew when the text changes.
        level: 'word', or 'char' for characters.
        scope: 'train' takes the vocabulary from the training split and reads every other word as
            `<unk>`, the honest rule; 'all' takes it from all splits, as the authors' release does.
        limits: use only the first so many tokens of a split.
        dataset: a name in `SOURCES` checks the numbers of tokens; 'text' is anything.
        partial: accept a split with another number of tokens than its data set has.
    """
    folder, limits = Path(folder), limits or {}
    if level not in ("word", "char"):
        raise ValueError(f"level must be 'word' or 'char', got {level!r}")
    if scope not in ("train", "all"):
        raise ValueError(f"vocabulary must be 'train' or 'all', got {scope!r}")
    files = _find(folder, dataset)
    seen = [(f.name, f.stat()) for f in files.values()]
    # The time of change as well: a copy may keep the size and the time of modification.
    stamps = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in seen]
    key = json.dumps([str(folder.resolve()), stamps, level, scope, sorted(limits.items())])
    place = Path(cache) / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not (place / "words.json").exists() or not _is_intact(place):
        _encode(files, place, level, scope, limits)
    words = json.loads((place / "words.json").read_text())
    # Copy on write: torch wants memory it could write to, though nothing does.
    tokens = {s: np.load(place / f"{s}.npy", mmap_mode="c") for s in SPLITS}
    _check_counts(tokens, limits, dataset, level, partial)
    return Corpus(tokens, words, level)


def _is_intact(place: Path) -> bool:
    """Whether the cache is what was written; one from before checksums counts as such."""
    path = place / "sha256.json"
    try:
        stated = json.loads(path.read_text()) if path.exists() else {}
        sound = all(_sha256(place / name) == digest for name, digest in stated.items())
    except (OSError, ValueError, AttributeError):
        sound = False
    if not sound:
        warnings.warn(f"{place} is damaged: the text is encoded again", stacklevel=3)
        shutil.rmtree(place)
    return sound


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenise(path: Path, level: Level) -> Iterator[list[str]]:
    """Yield the tokens of each line, `<eos>` last."""
    with path.open(encoding="utf-8") as lines:
        try:
            for line in lines:
                text = line.strip()
                yield [*(text.split() if level == "word" else text), EOS]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from None


def _find(folder: Path, dataset: str) -> dict[str, Path]:
    files = {split: folder / f"{split}.txt" for split in SPLITS}
    missing = [f.name for f in files.values() if not f.is_file()]
    if missing:
        source = SOURCES.get(dataset)
        hint = ""
        if source is not None:
            counts = ", ".join(f"{s} {n:,}" for s, n in source.tokens.items())
            hint = f" It comes from {source.origin}; tokens expected: {counts}."
        raise ValueError(
            f"{folder} has no {', '.join(missing)}: a folder with train.txt, valid.txt and "
            f"test.txt is expected.{hint}"
        )
    return files


def _check_counts(
    tokens: dict[str, Any], limits: dict[str, int], dataset: str, level: Level, partial: bool
) -> None:
    source = SOURCES.get(dataset)
    if source is None or level != "word" or partial:
        return
    for split, expected in source.tokens.items():
        found, expected = len(tokens[split]), min(expected, limits.get(split, expected))
        if found != expected:
            raise ValueError(
                f"the {split} split of {dataset} has {found:,} tokens, {expected:,} are expected. "
                f"The data set comes from {source.origin}. --partial uses it as it is; say so "
                "beside every number that you report from it"
            )


def _limited(lines: Iterable[list[str]], limit: int | None) -> Iterator[list[str]]:
    left = limit
    for line in lines:
        if left is None:
            yield line
        elif left > 0:
            yield line[:left]
            left -= len(line)
        else:
            return


def _encode(
    files: dict[str, Path], place: Path, level: Level, scope: Scope, limits: dict[str, int]
) -> None:
    """Count, number, and write; the folder appears when it is complete."""
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _write_encoded(files, partial, level, scope, limits)
        sums = {path.name: _sha256(path) for path in partial.iterdir()}
        (partial / "sha256.json").write_text(json.dumps(sums))
        with contextlib.suppress(OSError):  # another process was faster
            os.replace(partial, place)
    except OSError as error:
        raise OSError(
            f"cannot encode the text into the cache {place.parent}: {error}. Nothing was kept; "
            "free some space, or choose another cache"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_encoded(
    files: dict[str, Path], place: Path, level: Level, scope: Scope, limits: dict[str, int]
) -> None:
    counts: Counter[str] = Counter()
    lengths = {}
    for split, path in files.items():
        length = 0
        for line in _limited(tokenise(path, level), limits.get(split)):
            length += len(line)
            if scope == "all" or split == "train":
                counts.update(line)
        lengths[split] = length
    if scope == "train":
        counts.setdefault(UNKNOWN, 0)
    # Most frequent first, ties by spelling: the numbers do not depend on the order of reading.
    words = sorted(counts, key=lambda w: (-counts[w], w))
    numbers = {word: i for i, word in enumerate(words)}
    unknown = numbers.get(UNKNOWN, -1)
    for split, path in files.items():
        shape = {"descr": "<i4", "fortran_order": False, "shape": (lengths[split],)}
        # Plain writes, because a full disk is an error to them and a SIGBUS to a memory map.
        with (place / f"{split}.npy").open("wb") as out:
            np.lib.format.write_array_header_1_0(out, shape)
            for line in _limited(tokenise(path, level), limits.get(split)):
                out.write(np.array([numbers.get(w, unknown) for w in line], "<i4").tobytes())
    (place / "words.json").write_text(json.dumps(words))
