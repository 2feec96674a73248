"""Both distributions, built and installed without a network; the library beside torch alone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import adaptive_tbptt

ROOT = Path(__file__).parent.parent
SOURCES = {"adaptive_tbptt": ROOT, "adaptive_tbptt_paper": ROOT / "paper"}
PACKAGES = {"adaptive_tbptt": "adaptive_tbptt", "adaptive_tbptt_paper": "atbptt_paper"}
linked = pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
ABSENT = ("atbptt_paper", "lightning", "matplotlib", "plotly", "ray", "rich", "safetensors",
          "tensorboard", "typer")  # fmt: skip
USE = """
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import adaptive_tbptt as at

present = [name for name in sys.argv[1:] if find_spec(name) is not None]
assert not present, present
assert Path(at.__file__).is_relative_to(sys.prefix), at.__file__
assert at.__version__ == version("adaptive-tbptt"), at.__version__

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
def dist(tmp_path_factory):
    """A folder with the sdist of each distribution, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    for source in SOURCES.values():
        run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder),
            cwd=source)  # fmt: skip
    sdists = map(str, folder.glob("*.tar.gz"))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--wheel-dir", str(folder), *sdists)  # fmt: skip
    return folder


def built(dist, name, ending):
    return dist / f"{name}-{adaptive_tbptt.__version__}{ending}"


@pytest.fixture(scope="module")
def wheel(dist):
    return built(dist, "adaptive_tbptt", "-py3-none-any.whl")


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


def environment(place, *names):
    """Make an environment with these distributions and what they require; nothing is fetched.

    Their files are links into the environment that runs the tests.
    """
    run(sys.executable, "-m", "venv", "--without-pip", str(place))
    python = place / "bin" / "python"
    here = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(str(python), "-I", "-c", here).strip())
    for distribution in required(*names).values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = packages / name
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(name))).resolve())
    return python


def install(python, *wheels):
    """Install with pip, which checks that what they require is there."""
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index",
        *map(str, wheels))  # fmt: skip


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """An environment with the wheel, torch, numpy and what those two require."""
    place = tmp_path_factory.mktemp("bare") / "env"
    install(environment(place, "torch", "numpy"), wheel)
    return place


def test_twine_finds_no_fault(dist):
    files = sorted(map(str, dist.iterdir()))
    assert len(files) == 4
    printed = run(sys.executable, "-m", "twine", "check", "--strict", *files)
    assert printed.count("PASSED") == 4


@pytest.mark.parametrize("name", SOURCES)
def test_the_sdist_has_every_source_and_the_wheel_every_module(dist, name):
    source, package = SOURCES[name], PACKAGES[name]
    modules = {path.relative_to(source / "src") for path in source.glob(f"src/{package}/**/*.py")}
    with tarfile.open(built(dist, name, ".tar.gz")) as archive:
        packed = {Path(*Path(path).parts[1:]) for path in archive.getnames()}
    with zipfile.ZipFile(built(dist, name, "-py3-none-any.whl")) as archive:
        wheel = archive.namelist()
    assert {Path("src") / path for path in modules} <= packed
    assert {Path("LICENSE"), Path("README.md"), Path("pyproject.toml")} <= packed
    assert {path.parts[0] for path in packed if len(path.parts) > 1} <= {"src", "tests", "examples"}
    assert {Path(path) for path in wheel if path.endswith(".py")} == modules
    assert any(path.endswith("licenses/LICENSE") for path in wheel)


@linked
def test_both_wheels_install_together(dist, tmp_path):
    names = ("torch", "numpy", "matplotlib", "rich", "safetensors", "typer")
    python = environment(tmp_path / "env", *names)
    install(python, *dist.glob("*.whl"))
    shown = run(str(python), "-I", str(python.parent / "atbptt-paper"), "--help", cwd=tmp_path)
    assert "reproduce" in shown


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


@linked
def test_torch_and_numpy_are_enough_to_probe_train_and_save(bare, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Isolated: neither the working directory nor PYTHONPATH is looked at.
    python = [str(bare / "bin" / "python"), "-I", "-W", "error"]
    printed = run(*python, "-c", USE, *ABSENT, cwd=tmp_path, env=env)
    assert printed.split()[-3:] == ["30", "2", "240"]
    assert (tmp_path / "state.pt").stat().st_size > 0


@linked
def test_the_command_says_which_extra_it_needs(bare, tmp_path):
    command = [str(bare / "bin" / "python"), "-I", str(bare / "bin" / "atbptt"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "atbptt needs typer: pip install 'adaptive-tbptt[cli]'"
