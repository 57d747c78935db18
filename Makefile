# DDTree for vLLM. `make` lists the goals.
#
# Each goal makes what it needs first, so `make demo` and `make test` work from a fresh
# clone.

VENV ?= .venv
PYTHON ?=
RELEASE ?=
PAIR ?= tiny-qwen3
PORT ?= 8000
BUDGET ?= 31
ONTO ?=
ARGS ?=

export VENV PYTHON RELEASE TORCH_BACKEND INSTALLER BUILDER

py := $(VENV)/bin/python
apply := $(py) apply.py
release := $(if $(RELEASE),--release $(RELEASE))
cpu_env := OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 \
	HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
tools := $(VENV)/.ddtree-tools
vllm := $(VENV)/.ddtree-vllm

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup fetch apply verify install uninstall check demo serve test \
	test-full test-image lint export build build-cpu rebase-check clean distclean

help:  ## list the goals
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' \
		Makefile
	@echo
	@echo "  Variables: PYTHON (a Python 3.10 to 3.12), VENV ($(VENV)), RELEASE,"
	@echo "  PAIR ($(PAIR)), PORT ($(PORT)), BUDGET ($(BUDGET)), ONTO,"
	@echo "  INSTALLER (uv or pip), TORCH_BACKEND (empty or cpu), ARGS (more arguments"
	@echo "  for demo, serve, build and tests)."

$(tools): scripts/setup.sh scripts/pins.py requirements/tools.txt
	@sh scripts/setup.sh tools
	@touch $@

# Not upstream.lock: it changes with every patch, the wheel that it pins does not.
$(vllm): $(tools) requirements/torch.txt
	@sh scripts/setup.sh vllm
	@touch $(tools) $@

setup: $(vllm)  ## make the virtual environment with the pinned CPU build of vLLM

fetch: $(tools)  ## bring the pinned vLLM source into build/cache
	$(apply) fetch $(release)

apply: fetch  ## make the patched work tree build/vllm-VERSION
	$(apply) apply $(release)

verify: fetch  ## recompute everything in upstream.lock
	$(apply) verify $(release)

install: setup apply  ## patch the vLLM of the virtual environment
	$(apply) install --python $(abspath $(py)) $(release)

uninstall: $(tools)  ## give that vLLM its own files back
	$(apply) uninstall --python $(abspath $(py)) $(release)

check: $(tools)  ## say whether that vLLM is patched and intact
	$(apply) install --check --python $(abspath $(py)) $(release)

demo: install  ## decode held-out text plainly, with DFlash and with DDTree
	$(py) scripts/demo.py --pair $(PAIR) $(ARGS)

serve: install  ## serve the bundled pair with DDTree on PORT
	$(cpu_env) $(VENV)/bin/vllm serve models/$(PAIR)/target --port $(PORT) \
		--served-model-name $(PAIR) --dtype float32 --enforce-eager \
		--max-model-len 1024 --speculative-config \
		'{"method": "ddtree", "model": "models/$(PAIR)/drafter", "tree_budget": $(BUDGET)}' \
		$(ARGS)

test: install  ## run the tests, but not those of many minutes
	@sh scripts/run_tests.sh $(py) -m "not full" $(ARGS)

test-full: install  ## run all tests
	@sh scripts/run_tests.sh $(py) $(ARGS)

lint: fetch  ## check the Python code, the workflows, the patch files, the overlay
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	@sh scripts/lint-workflows.sh
	$(VENV)/bin/hadolint docker/Dockerfile docker/Dockerfile.cpu
	$(apply) lint $(release)

export: $(tools)  ## write the work tree's commits back to patches/ and overlay/
	$(apply) export $(release)

build: fetch  ## build the serving image (BUILDER=docker or podman)
	$(apply) build $(release) $(ARGS)

build-cpu: fetch  ## build the CPU image with the bundled pair
	$(apply) build --cpu $(release) $(ARGS)

test-image: install  ## build the images, serve from them, test them
	$(py) -m pytest tests/image $(ARGS)

# make itself ends with 2 on any failure; apply.py gives 0 all apply, 1 some do not,
# 2 could not run.
rebase-check: fetch  ## try the series on the newest stable vLLM, or on ONTO=
	$(apply) rebase --onto $(if $(ONTO),$(ONTO),latest) $(release) \
		--report build/rebase-report $(ARGS)

clean:  ## remove caches; sources, work tree and environment stay
	find . \( -path ./build -o -path ./$(VENV) -o -path ./.git \) -prune -o \
		-type d \( -name __pycache__ -o -name .pytest_cache -o -name .ruff_cache \) \
		-exec rm -rf {} +
	rm -f demo.png demo.json

distclean: clean  ## remove all that was made, unless edits would be lost
	@sh scripts/distclean.sh
