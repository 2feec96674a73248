"""What several tests of the paper share: both command lines, a tiny run, made-up cells."""

import json
import signal
import subprocess

from tests import command_line

from atbptt_paper import cli as paper
from atbptt_paper.tasks.copy_task import CopyConfig

TINY_OPTIONS = [
    "--preset", "quick", "--m", "2", "--train-steps", "120", "--valid-steps", "60", "--batch", "8",
    "--hidden", "8", "--lags", "20", "--k-max", "20", "--k-init", "4", "--epochs", "2",
]  # fmt: skip
TINY = CopyConfig(
    m=2, train_steps=120, valid_steps=60, batch=8, hidden=8, layers=1, epochs=2, lags=20,
    k_max=20, k_init=4, burn_in=2, error_bar_every=1, error_bar_repeats=3,
)  # fmt: skip


def call(*args, code=0, columns=200):
    """Run `atbptt-paper`; return what it printed."""
    return command_line.call(*args, code=code, columns=columns, app=paper.app, name="atbptt-paper")


def ask(*args, code=0):
    """Run `atbptt`, the library's command; return what it printed."""
    return command_line.call(*args, code=code)


def train(*args, code=0):
    """Run `atbptt-paper train copy` on a tiny budget."""
    return call("train", "copy", *TINY_OPTIONS, *args, code=code)


def start(command, **options):
    """Start a process that listens to Ctrl-C, also where this one ignores it, as under nohup."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, text=True, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def data_of(report):
    """Return what the page of a report gives to Plotly."""
    text = report.read_text()
    begin = text.index('id="data">') + len('id="data">')
    return json.loads(text[begin : text.index("</script>", begin)])


def fake(setting, init, test, valid=None, k=10, bias=0.2, early_bias=0.01):
    """A finished cell with made-up curves: perplexity falls at epoch 50, K rises."""
    epochs = list(range(1, 101))
    ks = [3] * 40 + [k] * 60
    repeats = [
        {"epoch": e, "k": [k], "beta": [0.8], "relative_bias": [early_bias if e < 10 else bias]}
        for e in range(1, 101, 5)
    ]
    curve = [1.7 if e < 50 else test for e in epochs]
    if setting == "K=30":
        curve = [1.7 if e < 80 else test for e in epochs]
    return {
        "setting": setting, "init": init, "epochs": 100, "best_epoch": 100, "seconds": 36.0,
        "valid_ppl": valid or test, "test_ppl": test, "updates": 1,
        "curves": {"epoch": epochs, "data_passes": [float(e) for e in epochs], "valid_ppl": curve,
                   "test_ppl": curve, "k": ks, "relative_bias": [bias] * 100, "beta": [0.8] * 100},
        "repeats": repeats,
        "decay": {"mean": [0.8**i for i in range(50)], "draws": [[0.8**i for i in range(50)]],
                  "beta": 0.8, "tau": 40, "last": 49, "component_beta": {"h": 0.8},
                  "components": {"h": [0.7**i for i in range(50)]}},
        "stability": "decaying in expectation though unstable: beta=0.8 from lag 40 on",
        "origin": {"machine": "m", "python": "3", "torch": "2", "commit": "abc"},
    }  # fmt: skip


def table_cells(**changes):
    values = {"K=5": 1.65, "K=10": 1.036, "K=15": 1.039, "K=20": 1.04, "K=30": 1.043,
              "delta=0.9": 1.02, "delta=0.5": 1.03, "delta=0.1": 1.03}  # fmt: skip
    values |= changes
    deltas = {"delta=0.9": 0.8, "delta=0.5": 0.4, "delta=0.1": 0.09}
    return [
        fake(s, i, v + 0.002 * i, bias=deltas.get(s, 0.2))
        for s, v in values.items()
        for i in (0, 1)
    ]
