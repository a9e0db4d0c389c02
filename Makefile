# make demo    one generation with a packed, bounded cache
# make test    the whole suite, with the tests that need the real model
# Both need python 3.11 or newer and a network, nothing else. PYTHON=... picks another interpreter.

# The first that really runs (a pyenv shim may exist and fail) and can make an environment.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && echo $$p && break; done)

ifeq ($(shell uname),Darwin)
EXTRAS := test
else
EXTRAS := cpu,test
# mlx multiplies matrices several times faster with OpenBLAS, where it is installed.
OPENBLAS := $(shell PATH="$$PATH:/sbin:/usr/sbin"; ldconfig -p 2>/dev/null | \
	awk '$$1 == "libopenblas.so.0" { print $$NF; exit }')
endif
# CI tests another environment's python too, with arguments of its own.
RUNS := .venv/bin/python
ARGS :=
RUN := $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS) )$(RUNS)
MODEL := models/SmolLM2-135M-Instruct

.PHONY: demo test lint env model

demo: model
	$(RUN) -m mlx_kivi.generate --model $(MODEL) \
	  --prompt "How do I grow tomatoes?" --max-tokens 200 \
	  --kv-quantize int4 --streaming-llm-sink 4 --streaming-llm-window 1024

# One BLAS thread a worker: the workers already share the cores.
test: model
	OPENBLAS_NUM_THREADS=1 $(RUN) -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: env
	.venv/bin/ruff check
	.venv/bin/mypy

model: env
	.venv/bin/python scripts/get_model.py

env: .venv/installed

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no python 3.11 or newer with venv found;" \
	  "install one (Debian: python3-venv) or say make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@
