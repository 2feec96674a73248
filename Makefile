# Two commands from a machine that has only Python, venv and make: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
READY := .venv/ready
LOWEST := $(subst .venv,build/lowest,$(BIN))

.PHONY: run test lint test-lowest docs figures bench format clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# Both distributions are installed from here: the library, and the paper's experiments in paper/.
# constraints.txt pins every version that is tested; torch among them, whose newest build would
# bring gigabytes of CUDA packages along.
$(READY): pyproject.toml paper/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --group dev -e '.[all]' -e './paper[ray]'
	@touch $(READY)

run: $(READY)  ## a detach loop and ours side by side, at equal time; ends with a picture
	rm -rf runs/quick
	OMP_NUM_THREADS=1 $(BIN)/python examples/longer_memory.py --out runs/quick

test: lint  ## format, lint, types, tests, doctests, examples, documentation
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(READY)  ## format, lint, types, layers: what pre-commit runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Old releases of others warn of what newer Pythons and packages deprecate: not our concern here.
test-lowest:  ## the main tests with the lowest versions that pyproject.toml allows; in build/lowest
	$(PYTHON) -m venv build/lowest
	$(LOWEST)/python -m pip install --quiet -c constraints-lowest.txt pytest pytest-xdist hypothesis -e '.[all]' -e ./paper
	OMP_NUM_THREADS=1 $(LOWEST)/python -m pytest -n 2 -W ignore::DeprecationWarning tests/data tests/estimate tests/integrations tests/measure tests/report tests/train tests/test_cli.py tests/test_light_import.py paper/tests/test_cli.py paper/tests/test_tables.py

docs: $(READY)  ## build the documentation into site/; nothing is fetched from the network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html, or for the search: $(BIN)/python -m http.server --directory site"

figures: $(READY)  ## run the tutorials again and draw the pictures of the documentation
	$(BIN)/python tools/readme_figure.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/adapting_figure.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/run_tutorials.py
	$(BIN)/python tools/make_notebooks.py
	OMP_NUM_THREADS=1 $(BIN)/python examples/rainfall_runoff.py --out docs/img

bench: $(READY)  ## time contenders side by side; on a quiet machine
	$(BIN)/python benchmarks/speed.py --size copy --size ptb-small --size ptb --sweeps --out benchmarks/results/speed
	$(BIN)/python benchmarks/memory.py --out benchmarks/results/speed

format: $(READY)  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and everything generated
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist paper/dist runs site
