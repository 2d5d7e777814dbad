# make setup   the environment in .venv: pinned dependencies, Detectron2 and this project
# make demo    set-up, then train, evaluate and look at a small model on the shapes data set
# make test    set-up, then the quick tests, which touch every module
# make test-all   set-up, then all tests but those of a release, with more random cases
# make test-rest  what `make test` leaves out of it; TESTS=tests/training of some rooms
# make matrix  the quick tests under other versions of Python and PyTorch; writes docs/versions.md
# make lint    set-up, then ruff (rules and formatting), and the size of each room
#
# make setup PYTHON=/path/to/python3 takes a certain Python, 3.11 or newer.

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEPENDENCIES := .venv/dependencies-are-complete
PROJECT := .venv/project-is-installed

PYTHON ?= python3.13 python3.12 python3.11 python3
SUITABLE := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

.PHONY: setup demo test test-all test-rest matrix lint
.DEFAULT_GOAL := setup

setup: $(PROJECT)

# Started again, it goes on where it was stopped
DEMO := output/demo

demo: setup
	$(BIN)/python datasets/make_shapes.py
	$(BIN)/lambda-det train --config configs/quick/shapes_lambdaresnet26_slim.yaml --resume \
		--output $(DEMO)
	$(BIN)/lambda-det predict $(DEMO) --overwrite --output $(DEMO)/pictures \
		--input "$${DETECTRON2_DATASETS:-datasets}/shapes/val/00000?.png"
	$(BIN)/lambda-det report $(DEMO)

# Two processes of one thread each take half the time of one process of two; a file stays in one.
# Long tests wait for others' processes and for disks, which leaves room for a third. What Python
# compiles is kept, even where PYTHONDONTWRITEBYTECODE is set: each process would compile it again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --dist loadfile --no-loadscope-reorder
ALL := LAMBDA_DET_FUZZ=15 $(PYTEST) -n 3
LONG := slow or fuzz or benchmark or gpu or release
TESTS ?= tests projects

test: setup
	$(PYTEST) -n 2 -m "not ($(LONG))"

test-all: setup
	$(ALL) -m "not release" $(TESTS)

test-rest: setup
	$(ALL) -m "($(LONG)) and not release" $(TESTS)

matrix: setup
	$(BIN)/python .ci/matrix.py

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python .ci/size.py

# Each candidate is run, since one on the PATH may be no more than a stand-in (pyenv's) or lack venv
# (Debian's). The stamp is taken away first and comes back last; without it the environment starts
# from nothing, because one that was cut short may hold half a package that pip takes for whole.
$(DEPENDENCIES): requirements.txt lambda_det/install_detectron2.py
	@if [ ! -f $@ ]; then \
		for python in $(PYTHON) ""; do \
			if "$$python" -c '$(SUITABLE)' >/dev/null 2>&1; then break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "error: none of these is a Python 3.11 or newer that can make environments:" \
				"$(PYTHON); install one (on Debian and Ubuntu python3-venv belongs to it) or name" \
				"it: make setup PYTHON=/path/to/python3" >&2; \
			exit 1; \
		fi; \
		echo "Making .venv with $$("$$python" --version)"; \
		"$$python" -m venv --clear .venv; \
	fi
	@rm -f $@ $(PROJECT)
	@echo "Installing the pinned dependencies (a few minutes, PyTorch is large)"
	@$(PIP) install --requirement requirements.txt
	@# Alone, since it asks for opencv-python, which would overwrite the headless one
	@$(PIP) install --no-deps lvis==0.5.3
	@$(BIN)/python tools/install_detectron2.py
	@touch $@

$(PROJECT): $(DEPENDENCIES) setup.py pyproject.toml
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "The environment in .venv is ready"
