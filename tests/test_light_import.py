"""The library needs torch and numpy alone; every other package is imported where it is used."""

import os
import subprocess
import sys

OPTIONAL = ["jinja2", "lightning", "matplotlib", "plotly", "ray", "rich", "safetensors",
            "tensorboard", "typer"]  # fmt: skip
BLOCK = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None  # importing it raises ImportError
"""
SETUP = """
import warnings
import torch
from torch import nn
import adaptive_tbptt as at

warnings.simplefilter("ignore", at.TruncationWarning)
torch.manual_seed(0)
x = torch.randn(80, 4, 3)
stream, model, loss_fn = at.SequenceStream(x, x), nn.GRU(3, 3), nn.MSELoss()
tbptt = at.AdaptiveTBPTT(model, loss_fn, at.BiasTolerance(delta=0.5, k_max=10, lags=20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def run(code, folder):
    """Run code where none of the optional packages can be imported."""
    command = [sys.executable, "-W", "error", "-c", BLOCK + SETUP + code]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_train_probe_and_save_without_any_optional_package(tmp_path):
    done = run(
        """
result = at.Trainer(tbptt, optimizer).fit(stream, stream, epochs=2)
profile = at.probe(model, loss_fn, x[:40], x[:40])
torch.save({"model": model.state_dict(), "tbptt": tbptt.state_dict()}, "saved.pt")
saved = torch.load("saved.pt")
model.load_state_dict(saved["model"])
tbptt.load_state_dict(saved["tbptt"])
print(result.epochs, profile.lags, saved["tbptt"]["trained_steps"])
""",
        tmp_path,
    )
    assert done.stdout.split() == ["2", "40", "160"]
    lines = done.stderr.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1", "epoch 2"]


def test_a_run_folder_without_safetensors_names_the_extra_before_training(tmp_path):
    done = run(
        """
try:
    at.Trainer(tbptt, optimizer, run_dir="run")
except ImportError as error:
    print(error)
""",
        tmp_path,
    )
    assert "pip install 'adaptive-tbptt[checkpoint]'" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_figure_without_matplotlib_is_the_only_thing_that_fails(tmp_path):
    done = run(
        """
report = at.diagnose(model, loss_fn, stream, lags=20)
print(report)
try:
    report.figure("decay.png")
except ImportError as error:
    print(error)
""",
        tmp_path,
    )
    assert "matplotlib" in done.stdout


def test_importing_does_not_bring_them_along():
    code = f"import sys, adaptive_tbptt; print(*set({OPTIONAL}) & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []
