"""The library's wheel, installed where there is torch and numpy and nothing else."""

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
ABSENT = ("atbptt_paper", "lightning", "matplotlib", "plotly", "ray", "rich", "safetensors",
          "tensorboard", "typer")  # fmt: skip
USE = """
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import adaptive_tbptt as at

present = [name for name in sys.argv[1:] if find_spec(name) is not None]
assert not present, present
assert Path(at.__file__).is_relative_to(sys.prefix), at.__file__

torch.manual_seed(0)
x = torch.randn(80, 4, 3)
stream, model, loss_fn = at.SequenceStream(x, x.roll(2, 0)), nn.GRU(3, 3), nn.MSELoss()
profile = at.probe(model, loss_fn, x[:40], x[:40], burn_in=10)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tbptt = at.AdaptiveTBPTT(model, loss_fn, at.BiasTolerance(delta=0.9, k_max=10, lags=20))
for window in tbptt.windows(stream):
    window.backward()
    optimizer.step()
    optimizer.zero_grad()
result = at.Trainer(tbptt, optimizer, run_dir=None).fit(stream, stream, epochs=2)

torch.save(tbptt.state_dict(), "state.pt")
tbptt.load_state_dict(torch.load("state.pt"))
print(profile.lags, result.epochs, tbptt.trained_steps)
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--wheel-dir", str(folder), str(ROOT))  # fmt: skip
    (found,) = folder.glob("*.whl")
    return found


def required(*names):
    """Return the distributions of these names and of what they require, on this machine."""
    found, waiting = {}, [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        extras = ["", *wanted.extras]
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(requirement)
    return found


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """An environment with the wheel, torch, numpy and what those two require; nothing is fetched.

    Their files are links into the environment that runs the tests.
    """
    place = tmp_path_factory.mktemp("bare") / "env"
    run(sys.executable, "-m", "venv", "--without-pip", str(place))
    python = place / "bin" / "python"
    here = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(str(python), "-I", "-c", here).strip())
    for distribution in required("torch", "numpy").values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = packages / name
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(name))).resolve())
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
        "--no-index", str(wheel))  # fmt: skip
    return place


def test_the_wheel_is_the_library_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(about).decode()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"adaptive_tbptt", about.partition("/")[0]}
    assert {"adaptive_tbptt/py.typed", "adaptive_tbptt/report/page.html"} <= set(names)
    lines = [line for line in text.splitlines() if line.startswith("Requires-Dist: ")]
    always = [line for line in lines if "extra ==" not in line]
    assert sorted(Requirement(line.partition(": ")[2]).name for line in always) == [
        "numpy",
        "torch",
    ]


def test_torch_and_numpy_are_enough_to_probe_train_and_save(bare, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Isolated: neither the working directory nor PYTHONPATH is looked at.
    python = [str(bare / "bin" / "python"), "-I", "-W", "error"]
    printed = run(*python, "-c", USE, *ABSENT, cwd=tmp_path, env=env)
    assert printed.split()[-3:] == ["30", "2", "240"]
    assert (tmp_path / "state.pt").stat().st_size > 0


def test_the_command_says_which_extra_it_needs(bare, tmp_path):
    command = [str(bare / "bin" / "python"), "-I", str(bare / "bin" / "atbptt"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "atbptt needs typer: pip install 'adaptive-tbptt[cli]'"
