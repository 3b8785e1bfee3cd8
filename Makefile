# Every target sets itself up: a virtual environment in .venv, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
CONSTRAINTS ?= constraints.txt
# Where there is no GPU, PyTorch comes without CUDA, which takes gigabytes. Sizes below are those on disk.
TORCH := $(or $(shell grep '^torch==' $(CONSTRAINTS)),$(shell grep -o 'torch>=[^"]*' pyproject.toml))
TORCH_INDEX := $(if $(shell command -v nvidia-smi),,--index-url https://download.pytorch.org/whl/cpu)
PIP_INSTALL := -m pip --disable-pip-version-check install --retries 1
PIP := $(BIN)/python $(PIP_INSTALL)
# uv is faster where it is there. It ignores pip's settings, so a local wheel folder named for pip is passed on.
UV := uv pip install --python $(BIN)/python $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))
INSTALL := $(if $(shell command -v uv),$(UV),$(PIP))

OLDEST_TRITON := .venv/oldest-triton
NEWEST_TRANSFORMERS := build/newest-transformers

.PHONY: demo test test-readme docs docs-serve dist test-gpu test-sanitizer test-faults test-mutations test-aot test-hf-common test-hf-models \
	test-clients bench gallery lint fmt clean

demo: .venv/.demo
	$(BIN)/affine-attn demo

test: .venv/.installed $(OLDEST_TRITON) lint
	$(BIN)/python -m pytest -n 2 -m "not gpu and not aot_full and not faults"
	PYTHONPATH=$(OLDEST_TRITON) $(BIN)/python -m pytest -n 2 -m "not aot_full" tests/kernels/test_aot.py tests/kernels/test_launch.py

docs: .venv/.installed
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "the site is in build/site/index.html"

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

# Source and wheel, checked, and the wheel in an environment that has nothing else.
dist: .venv/.torch
	rm -rf build/dist build/clean
	$(PIP) --quiet build twine
	$(BIN)/python -m build --outdir build/dist
	$(BIN)/python -m twine check --strict build/dist/*
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip --disable-pip-version-check install --quiet --retries 1 $(TORCH_INDEX) --no-deps "$(TORCH)"
	build/clean/bin/python -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS) build/dist/*.whl
	cd build/clean && bin/affine-attn --version && bin/affine-attn variants > /dev/null && \
		bin/python -c "import torch; from affine_attn import attention; x = torch.randn(1, 2, 8, 16); attention(x, x, x)"

# Most of their time these tests compile, on the CPU.
test-gpu: .venv/.installed
	$(BIN)/python -m pytest -n 8 -m gpu

# Every kernel under CUDA's memory and race checkers, which are slow: one odd shape with every kind of mask, and a long one.
# Without torch's cache of memory, where what lies past a tensor's end would belong to its neighbour. The race checker does
# not know by what cuDNN's kernels wait for each other, nor how Triton hands the parts of a Gluon kernel to its warps, and
# reports both. FlexAttention's kernels are torch's own.
SANITIZED = (T65x65-D80-everything or T300x900-D128-causal-bfloat16 or T300x900-D128-documents_interleaved-bfloat16 or \
	T1100x1100-D64-causal-bfloat16 or (decode and everything and bfloat16) or statistics or T129x129-D128-torch.bfloat16) \
	and not flex
test-sanitizer: .venv/.installed
	for tool in memcheck "racecheck --kernel-name-exclude kernel_substring=cudnn --kernel-name-exclude kernel_substring=sm90_"; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 9 \
			$(BIN)/python -m pytest -m gpu tests/engines/test_engines.py tests/kernels/test_sm90_backward.py -k "$(SANITIZED)" || exit; \
	done

# The faults of `make test` and those that take longer.
test-faults: .venv/.installed
	$(BIN)/python -m pytest tests/distill/test_faults.py

# Mistakes put into a copy of the tree, one at a time: the tests must notice each.
test-mutations: .venv/.installed
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.support.run_mutations

# Every command of the README and the tutorials, in order, in a fresh checkout with an environment of its own.
test-readme: .venv/.installed
	$(BIN)/python -m tests.support.pages

test-aot: .venv/.installed
	$(BIN)/python -m pytest -n 2 tests/kernels/test_aot.py

# transformers' own model tests, those it calls slow too, on models of this package and on its own with this attention:
# SOURCE is a checkout of its repository, used for the library and for the tests.
HF_SOURCE = $(abspath $(SOURCE))
test-hf-common: .venv/.installed
	@test -f "$(HF_SOURCE)/tests/test_modeling_common.py" || { echo "give SOURCE=path/to/transformers, a checkout"; exit 2; }
	cd "$(HF_SOURCE)" && PYTHONPATH="$(HF_SOURCE)/src:$(HF_SOURCE):$(CURDIR)" HF_HUB_OFFLINE=1 RUN_SLOW=1 \
		"$(CURDIR)/$(BIN)/python" -m pytest -q -n 2 -c /dev/null -p no:cacheprovider --import-mode=importlib \
		--rootdir="$(CURDIR)/hf_common" "$(CURDIR)/hf_common"

# Every decoder of transformers, eager against ours, with its oldest and its newest version; writes docs/hf-models.md.
test-hf-models: .venv/.installed $(NEWEST_TRANSFORMERS)
	@test -f "$(HF_SOURCE)/tests/test_modeling_common.py" || { echo "give SOURCE=path/to/transformers, a checkout"; exit 2; }
	cd "$(HF_SOURCE)"; status=0; \
	for library in "" "$(CURDIR)/$(NEWEST_TRANSFORMERS):"; do \
		PYTHONPATH="$$library$(HF_SOURCE):$(CURDIR)" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
			"$(CURDIR)/$(BIN)/python" -W ignore "$(CURDIR)/hf_common/models.py" || status=1; \
	done; \
	PYTHONPATH="$(CURDIR)" "$(CURDIR)/$(BIN)/python" "$(CURDIR)/hf_common/models.py" --page; exit $$status

# trl, PEFT, Lightning, accelerate, torchao, bitsandbytes, lm_eval on small models; writes docs/clients.md.
CLIENTS := build/clients
test-clients: $(CLIENTS)/.installed
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest tests/clients
	$(CLIENTS)/bin/python -m tests.clients.page

bench: .venv/.installed
	$(BIN)/affine-attn bench --update-docs

# After `make demo`: the figures and the table of docs/gallery.md, and the picture of the report.
gallery: .venv/.installed
	$(BIN)/python -m docs.gallery

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

fmt: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/.torch: $(CONSTRAINTS)
	@echo "1 of 3: a virtual environment in .venv"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "2 of 3: PyTorch $(if $(TORCH_INDEX),for the CPU (0.8 GB),with CUDA (several GB))"
	$(PIP) $(TORCH_INDEX) --no-deps "$(TORCH)"
	touch $@

.venv/.demo: .venv/.torch pyproject.toml
	@echo "3 of 3: what the demo uses, transformers above all (0.3 GB)"
	$(INSTALL) -c $(CONSTRAINTS) -e '.[demo]'
	@echo "done: $$(du -sh .venv | cut -f1) in .venv"
	touch $@

.venv/.installed: .venv/.torch pyproject.toml
	@echo "3 of 3: what models, evaluation, tests and documentation use (1.3 GB)"
	$(INSTALL) -c $(CONSTRAINTS) -e '.[dev]'
	@echo "done: $$(du -sh .venv | cut -f1) in .venv"
	touch $@

$(CLIENTS)/.installed: $(CONSTRAINTS) pyproject.toml tests/clients/requirements.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python $(PIP_INSTALL) $(TORCH_INDEX) --no-deps "$(TORCH)"
	$(CLIENTS)/bin/python $(PIP_INSTALL) --quiet -c $(CONSTRAINTS) -e '.[models,eval]' -r tests/clients/requirements.txt
	touch $@

# The oldest Triton that pyproject.toml allows: it comes with the torch that many have, and takes less of the language.
$(OLDEST_TRITON): | .venv/.installed
	$(PIP) --no-deps --target $@ triton==3.6.0

# constraints.txt has the oldest that pyproject.toml allows.
$(NEWEST_TRANSFORMERS): | .venv/.installed
	$(PIP) --quiet --no-deps --target $@ "$$(grep -o 'transformers>=[^"]*' pyproject.toml)"

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
