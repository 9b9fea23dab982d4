# make demo and make test are all the set-up there is: each builds .venv by itself.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Set TORCH_INDEX to a package index with CPU wheels of torch to spare a laptop the CUDA packages.
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
BIN := .venv/bin
READY := .venv/.ready
TRITON := .venv/.triton
BROWSER := .venv/.browser

.PHONY: demo test slow browser prove lint docs clean quick-1 quick-2 slow-1 slow-2 prove-1 prove-2

demo: $(READY)
	$(BIN)/plait train examples/stdlib_gpt/job.py --nproc 2
	$(BIN)/plait verify examples/stdlib_gpt/job.py --plan "dp=2"
	$(BIN)/plait plan examples/stdlib_gpt/job.py --machine h100x8
	$(BIN)/plait report --timeline
	$(BIN)/plait replay --step 12
	@echo "numbers of every step:  runs/latest/metrics.jsonl      where the time went:  runs/latest/events/"

test: $(READY) lint
	$(MAKE) --no-print-directory -k -j 2 quick-1 quick-2

slow: $(TRITON) $(BROWSER)
	$(MAKE) --no-print-directory -k -j 2 slow-1 slow-2

# Tests run on CPU processes that this one forks, which a process that has seen a GPU cannot. Two lanes of them at once.
quick-1 quick-2: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --lane $(@:quick-%=%)/2

# SLICE=K/N runs every N-th test, from the K-th. The long lists take hours.
SLICE ?= 1/1
slow-1 slow-2: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m "slow and not prove" --slice $(SLICE) --lane $(@:slow-%=%)/2

# The page of `plait report` in a browser: needs chromium and chromedriver, such as Debian's packages chromium and chromium-driver.
browser: $(BROWSER)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m slow -rs tests/run/test_report_page.py

prove: $(TRITON)
	$(MAKE) --no-print-directory -k -j 2 prove-1 prove-2

prove-1 prove-2: $(TRITON)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m prove --slice $(SLICE) --lane $(@:prove-%=%)/2 --timeout 1800

lint: $(READY)
	$(BIN)/ruff check -q .
	$(BIN)/pyrefly check --summarize-errors 2>&1 | tail -n 30

# Generated pages, then all of docs/ as a site in site/. Needs no network; look at it with: .venv/bin/python -m http.server -d site
docs: $(READY)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(READY): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --retries 0 $(INDEX) "$(TORCH)" numpy || $(BIN)/python -m pip install -q "$(TORCH)" numpy
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

# Only torch for CUDA brings Triton, in whose interpreter the kernel of dropout masks is tested. Where there is none, these tests are skipped.
$(TRITON): $(READY)
	$(BIN)/python -m pip install -q triton && touch $@ || echo "There is no Triton for this machine: the tests of its kernel are skipped."

# Drives a browser, and looks for what people with a screen reader stumble over.
$(BROWSER): $(READY)
	$(BIN)/python -m pip install -q -e ".[browser]" && touch $@ || echo "There is no selenium for this machine: the tests of the page in a browser are skipped."

clean:
	rm -rf .venv .engines runs build site src/plait.egg-info
