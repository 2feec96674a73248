"""Corpus, model and perplexity on small text made here, and on the real files where they are."""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import adaptive_tbptt as at
from atbptt_paper.config import preset_of
from atbptt_paper.experiments.run import train_run
from atbptt_paper.tasks.corpus import SOURCES, read_corpus
from atbptt_paper.tasks.language_task import PRESETS, LanguageConfig, LanguageModel, language_stream
from atbptt_paper.tasks.sequence_model import count_parameters, symbol_loss

DATA = os.environ.get("ADAPTIVE_TBPTT_DATA")
TEXT = {
    "train": "the cat sat\non the mat\n\nthe dog sat\n",
    "valid": "the bird sat\n",
    "test": "a cat\n",
}


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "text"
    place.mkdir()
    for split, text in TEXT.items():
        (place / f"{split}.txt").write_text(text)
    return place


def read(folder, **options):
    return read_corpus(folder, folder.parent / "cache", **options)


def test_one_eos_per_line_and_unseen_words_are_unknown(folder):
    corpus = read(folder)
    assert corpus.decode(corpus.tokens["train"]) == (
        "the cat sat <eos> on the mat <eos> <eos> the dog sat <eos>"
    )
    assert corpus.decode(corpus.tokens["valid"]) == "the <unk> sat <eos>"
    assert corpus.decode(corpus.tokens["test"]) == "<unk> cat <eos>"
    assert corpus.words[0] == "<eos>"  # the most frequent comes first
    assert corpus.words.count("<unk>") == 1


def test_the_releases_rule_takes_words_from_all_splits(folder):
    corpus = read(folder, scope="all")
    assert corpus.decode(corpus.tokens["valid"]) == "the bird sat <eos>"
    assert "<unk>" not in corpus.words


def test_characters_and_limits(folder):
    corpus = read(folder, level="char", limits={"train": 6})
    assert corpus.decode(corpus.tokens["train"]) == "the ca"
    assert corpus.words[corpus.tokens["test"][0]] == "a"


def test_the_cache_is_used_until_the_text_changes(folder):
    first = read(folder)
    places = list((folder.parent / "cache").iterdir())
    assert isinstance(first.tokens["train"], np.memmap)
    words = places[0] / "words.json"
    (places[0] / "sha256.json").unlink()  # as before caches had checksums
    words.write_text(json.dumps(["changed", *first.words[1:]]))
    assert read(folder).words[0] == "changed"
    (folder / "train.txt").write_text("other words\n")
    assert sorted(read(folder).words) == ["<eos>", "<unk>", "other", "words"]


FULL = """
import os, sys
from pathlib import Path
from atbptt_paper.tasks.corpus import read_corpus
try:
    read_corpus(sys.argv[1], sys.argv[2])
except OSError as error:
    print(error, "| left:", os.listdir(sys.argv[2]))
"""


def test_a_full_disk_is_a_sentence_and_leaves_nothing_behind(folder):
    (folder / "train.txt").write_text("the cat sat\n" * 50_000)
    cache = folder.parent / "cache"
    cache.mkdir()
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=128k none "$0" && exec "$@"']
    if shutil.which("unshare") is None or subprocess.run([*mount, cache, "true"]).returncode:
        pytest.skip("a small disk needs unshare and its permission to mount")
    command = [*mount, cache, sys.executable, "-c", FULL, folder, cache]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # not -7, SIGBUS
    assert f"cannot encode the text into the cache {cache}: [Errno 28]" in done.stdout
    assert "left: []" in done.stdout


@pytest.mark.parametrize("name", ["words.json", "train.npy", "sha256.json"])
def test_a_damaged_cache_is_made_anew(folder, name):
    first = read(folder)
    (place,) = (folder.parent / "cache").iterdir()
    sound = (place / name).read_bytes()
    for damage in (sound[:-1], bytes([*sound[:-3], sound[-3] ^ 1, *sound[-2:]])):
        (place / name).write_bytes(damage)
        with pytest.warns(UserWarning, match=f"{place.name} is damaged: the text is encoded again"):
            again = read(folder)
        assert again.words == first.words
        assert again.decode(again.tokens["train"]) == first.decode(first.tokens["train"])
        assert (place / name).read_bytes() == sound


def test_missing_and_truncated_files_are_named(folder):
    with pytest.raises(ValueError, match=r"train split of ptb has 13 tokens, 929,589 are expected"):
        read(folder, dataset="ptb")
    assert len(read(folder, dataset="ptb", partial=True).tokens["train"]) == 13
    (folder / "valid.txt").unlink()
    with pytest.raises(ValueError, match=r"has no valid\.txt.*Mikolov.*train 929,589"):
        read(folder, dataset="ptb")


def test_rows_are_contiguous_and_every_token_predicts_the_next():
    tokens = np.arange(32, dtype=np.int32)
    stream = language_stream(tokens, 3)
    assert (len(stream), stream.rows) == (10, 3)
    segment = stream.read(10)
    assert segment.inputs[:, 1].tolist() == list(range(10, 20))
    assert torch.equal(segment.targets, segment.inputs + 1)
    with pytest.raises(ValueError, match="too few"):
        language_stream(tokens, 40)


def test_the_tied_model_counts_its_parameters_once():
    model = LanguageModel(10_000, 900)
    assert count_parameters(model) == 10_000 * 900 + 4 * 900 * (900 + 900 + 2) + 10_000
    loose = LanguageModel(50, 8, tied=False)
    assert count_parameters(loose) == 2 * 50 * 8 + 4 * 8 * 18 + 50
    assert model.readout.weight is model.embedding.weight


@pytest.mark.parametrize(("cell", "layers"), [("gru", 1), ("rnn", 2), ("lstm", 2)])
def test_other_cells_and_layers(cell, layers):
    model = LanguageModel(30, 8, layers, cell)
    assert model(torch.randint(30, (5, 2)))[0].shape == (5, 2, 30)


def test_perplexity_of_a_short_text_by_hand(folder):
    corpus = read(folder)
    model = LanguageModel(len(corpus.words), 6).eval()
    tokens = torch.from_numpy(np.array(corpus.tokens["train"])).long()
    stream = language_stream(corpus.tokens["train"], 1)
    ours = math.exp(at.evaluate(model, symbol_loss, stream, chunk=3))
    product, state = 1.0, None
    for now, following in itertools.pairwise(tokens):
        with torch.no_grad():
            logits, state = model(now.view(1, 1), state)
        product *= float(torch.softmax(logits[0, 0].double(), 0)[following])
    assert ours == pytest.approx(product ** (-1 / (len(tokens) - 1)), rel=1e-6)


def test_presets_are_the_papers():
    ptb = PRESETS["ptb"]
    assert (ptb.hidden, ptb.batch, ptb.lr, ptb.lags, ptb.k_init) == (900, 32, 10.0, 400, 100)
    assert (ptb.k_min, ptb.k_max, ptb.dropout, ptb.tied, ptb.layers) == (10, 400, 0.2, True, 1)
    assert (ptb.weight_decay, ptb.burn_in, ptb.vocabulary, ptb.epochs) == (1e-7, 40, "all", 50)
    assert (PRESETS["wikitext-2"].hidden, PRESETS["wikitext-2"].step_scale) == (512, "linear")
    for name in ("ptb-small", "wikitext-2-small"):
        assert PRESETS[name].train_tokens // PRESETS[name].batch >= 10_000
    with pytest.raises(ValueError, match="did you mean ptb-small"):
        preset_of(PRESETS, "ptb-smal")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dataset": "pbt"}, "dataset must be one of text, ptb"),
        ({"dropout": 1.0}, "dropout must be in"),
    ],
)
def test_configurations_that_make_no_sense(values, says):
    with pytest.raises(ValueError, match=says):
        LanguageConfig(**values)


def test_without_data_the_sentence_says_where_it_comes_from():
    with pytest.raises(ValueError, match=r"--data is needed.*Mikolov"):
        PRESETS["ptb"].streams()


def tiny(tmp_path, **values):
    place = tmp_path / "words"
    if not place.exists():
        place.mkdir()
        rng = np.random.default_rng(0)
        for split, lines in (("train", 60), ("valid", 20), ("test", 20)):
            text = "\n".join(" ".join(rng.choice(list("abcdefg"), 9)) for _ in range(lines))
            (place / f"{split}.txt").write_text(text + "\n")
    return LanguageConfig(
        data=str(place), cache=str(tmp_path / "cache"), hidden=8, batch=4, epochs=2, lags=20,
        k_max=20, k_init=5, burn_in=2, lr=1.0, **values,
    )  # fmt: skip


def test_training_resumes_in_mid_epoch_exactly(tmp_path):
    config = tiny(tmp_path, delta=0.5)
    whole = train_run(config, tmp_path / "whole", show=False)
    steps = itertools.count(1)

    def stop(*_):
        if next(steps) == 11:
            signal.raise_signal(signal.SIGINT)

    hook = register_optimizer_step_post_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_run(config, tmp_path / "parts", show=False)
    finally:
        hook.remove()
    parts = train_run(config, tmp_path / "parts", resume=True, show=False)
    assert parts.fit.best_loss == whole.fit.best_loss
    for a, b in zip(parts.fit.history, whole.fit.history, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }


def test_the_head_runs_only_where_there_are_losses(tmp_path):
    config = tiny(tmp_path, k=5)
    model, stream = config.model(), config.streams()["train"]
    seen = []
    model.readout.register_forward_hook(lambda m, args, out: seen.append(out.shape[0]))
    tbptt = at.AdaptiveTBPTT(model, symbol_loss, at.FixedTruncation(5))
    tbptt.prepare(stream)  # looks at the first steps, head and all
    seen.clear()
    steps = sum(w.backward() is not None and w.steps for w in tbptt.windows(stream))
    assert sum(seen) == steps == len(stream)


@pytest.mark.skipif(DATA is None, reason="ADAPTIVE_TBPTT_DATA is not set")
@pytest.mark.parametrize(("name", "words"), [("ptb", 10_000), ("wikitext-2", None)])
def test_the_real_files(name, words, tmp_path):
    folder = Path(str(DATA)) / name
    corpus = read_corpus(folder, tmp_path, scope="all", dataset=name, partial=True)
    for split in ("valid", "test"):
        assert len(corpus.tokens[split]) == SOURCES[name].tokens[split]
    if words:
        assert len(corpus.tokens["train"]) == SOURCES[name].tokens["train"]
        assert len(corpus.words) == words
    counts = Counter(corpus.tokens["valid"].tolist())
    lines = (folder / "valid.txt").read_text().count("\n")
    assert counts[corpus.words.index("<eos>")] == lines


@pytest.mark.skipif(DATA is None, reason="ADAPTIVE_TBPTT_DATA is not set")
def test_a_few_steps_on_the_real_text(tmp_path):
    config = PRESETS["ptb-small"].changed(
        data=str(Path(str(DATA)) / "ptb"), cache=str(tmp_path), hidden=16, k=10
    )
    model, stream = config.model(), config.streams()["train"]
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    losses = []
    for window in at.AdaptiveTBPTT(model, symbol_loss, config.controller()).windows(stream):
        losses.append(float(window.backward()))
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == 40:
            break
    assert losses[0] == pytest.approx(math.log(len(config.corpus().words)), rel=0.05)
    assert sum(losses[-5:]) < sum(losses[:5])
