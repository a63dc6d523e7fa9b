# Every target does all of its own set-up in .venv: a Python of 3.10 or later, a C++17 compiler and make are enough.
# CMake and Ninja, where the machine has none, come with the build requirements.
# A second run does only what has changed; .venv/.*-done are the stamps.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

cpp := $(wildcard src/core/*.h src/core/*.cpp src/core/kernels/*.h src/core/kernels/*.cpp src/bind/*.h src/bind/*.cpp)
build_inputs := pyproject.toml CMakeLists.txt $(cpp)

.PHONY: help demo test lint bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    check the engine on this machine against the float64 oracle"
	@echo "make test    run the test suite (ARGS='-k batch' chooses)"
	@echo "make lint    ruff, mypy, clang-format, and a build with warnings as errors"
	@echo "make bench   time everything, against PyTorch if it is in .venv (ARGS='--quick' and others)"
	@echo "make clean   remove everything that these have made"
	@echo "PYTHON=python3.12 chooses the interpreter of a new .venv"

demo: $(VENV)/.package-done
	$(BIN)/retrograd verify $(ARGS)

test: $(VENV)/.package-done
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.package-done
	$(BIN)/retrograd bench all $(ARGS)

lint: $(VENV)/.lint-done $(VENV)/.warnings-done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m nanobind.stubgen -q -m retrograd._core -o build/_core.pyi
	diff build/_core.pyi src/retrograd/_core.pyi  # the stub is generated: copy it over
	$(BIN)/clang-format --dry-run -Werror $(cpp)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "retrograd needs Python 3.10 or later")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.package-done: $(VENV)/.made $(build_inputs)
	$(PIP) install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.lint-done: $(VENV)/.made $(build_inputs)
	$(PIP) install --quiet --editable '.[test,lint]'
	@touch $(VENV)/.package-done $@

# In a build directory of its own: the warnings of an incremental build are those of the files it compiled.
$(VENV)/.warnings-done: $(VENV)/.made $(build_inputs)
	$(PIP) wheel --quiet --no-deps --wheel-dir build/warnings-wheel \
	    -Cbuild-dir=build/warnings -Ccmake.define.RETROGRAD_WERROR=ON .
	@touch $@
