# Every target sets itself up: a virtual environment in .venv, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
# uv ignores pip's settings, so a local wheel folder named for pip is passed on.
UV_FLAGS := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))

.PHONY: demo test test-gpu test-hf-common bench lint fmt clean

demo: .venv/.installed
	$(BIN)/affine-attn demo

test: .venv/.installed lint
	$(BIN)/python -m pytest -n 2 -m "not gpu"

test-gpu: .venv/.installed
	$(BIN)/python -m pytest -m gpu

# transformers' own common model tests: SOURCE is a checkout of its repository, used for the library and for the tests.
test-hf-common: .venv/.installed
	@test -f "$(SOURCE)/tests/test_modeling_common.py" || { echo "give SOURCE=path/to/transformers, a checkout"; exit 2; }
	cd "$(SOURCE)" && PYTHONPATH="$(SOURCE)/src:$(SOURCE):$(CURDIR)" HF_HUB_OFFLINE=1 "$(CURDIR)/$(BIN)/python" -m pytest -q \
		-c /dev/null --rootdir="$(CURDIR)/hf_common" --import-mode=importlib -p no:cacheprovider -n 2 \
		"$(CURDIR)/hf_common/test_common.py"

bench: .venv/.installed
	$(BIN)/affine-attn bench

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

fmt: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	if command -v uv >/dev/null; then uv pip install --python $(BIN)/python $(UV_FLAGS) -c constraints.txt -e '.[dev]'; \
	else $(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'; fi
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
