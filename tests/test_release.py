"""What is said in two places about a release agrees: versions, Pythons, lower bounds, checks."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import adaptive_tbptt

ROOT = Path(__file__).parent.parent
PROJECTS = {
    name: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for name, folder in {"adaptive-tbptt": ".", "adaptive-tbptt-paper": "paper"}.items()
}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path: str):
    return yaml.safe_load((ROOT / path).read_text())


def matrix() -> dict[str, list[str]]:
    return load(".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]


def test_one_version_everywhere():
    version = adaptive_tbptt.__version__
    assert PROJECTS["adaptive-tbptt-paper"]["version"] == version
    citation = load("CITATION.cff")
    assert citation["version"] == version
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[:2] == ["Unreleased", f"{version} - {citation['date-released']}"]


@pytest.mark.parametrize("name", PROJECTS)
def test_the_pythons_of_the_classifiers_are_those_that_are_tested(name):
    project = PROJECTS[name]
    label = "Programming Language :: Python :: 3."
    minors = [c.removeprefix(label) for c in project["classifiers"] if c.startswith(label)]
    assert [f"3.{minor}" for minor in minors] == matrix()["python"]
    assert SpecifierSet(project["requires-python"]) == SpecifierSet(f">=3.{minors[0]}")


def test_every_system_is_tested():
    assert {name.partition("-")[0] for name in matrix()["os"]} == {"ubuntu", "macos", "windows"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_a_workflow_runs_targets_that_exist_and_may_only_read(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    lines = [step.get("run", "") for step in steps]
    assert {line.split()[1] for line in lines if line.startswith("make ")} <= targets
    assert all(("run" in step) != ("uses" in step) for step in steps)


def test_the_commit_hook_is_a_part_of_make_test():
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in repository["hooks"]] == ["make lint"]
    assert re.search(r"^test: lint\b", (ROOT / "Makefile").read_text(), re.MULTILINE)


def bounds(requirements: list[str]) -> dict[str, str]:
    """Return the lower bound of every requirement, by name."""
    found = {}
    for requirement in map(Requirement, requirements):
        low = [part.version for part in requirement.specifier if part.operator == ">="]
        if low:
            found[requirement.name] = low[0]
    return found


def test_the_lowest_versions_are_the_lower_bounds():
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert lowest.pop("torch") == "2.13.0"  # no other torch has been run
    library, paper = PROJECTS.values()
    extras = [line for extra in library["optional-dependencies"].values() for line in extra]
    for requirements in (library["dependencies"] + extras, paper["dependencies"]):
        for name, low in bounds(requirements).items():
            if name not in ("torch", "adaptive-tbptt"):
                assert SpecifierSet(f"=={low}").contains(lowest[name]), name
    assert set(lowest) < set(bounds(library["dependencies"] + extras))


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")))
def test_an_issue_template_asks_for_something(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_every_reference_of_the_software_paper_is_in_its_bibliography():
    text = (ROOT / "joss" / "paper.md").read_text()
    cited = set(re.findall(r"(?<![\w.])@([\w-]+)", text))
    listed = set(re.findall(r"^@\w+\{([\w-]+),", (ROOT / "joss/paper.bib").read_text(), re.M))
    assert cited == listed
