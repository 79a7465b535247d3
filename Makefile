# `make train` and `make test` are complete on a machine with Python 3.11+, pip and make alone.

PYTHON ?= python3
# CUDA= forces the CPU; CUDA=12 asks for the older CUDA.
CUDA ?= $(shell nvidia-smi >/dev/null 2>&1 && echo 13)
comma := ,
TRAIN_EXTRAS := examples$(if $(CUDA),$(comma)cuda$(CUDA))
CUDA_PLUGINS := jax-cuda12-plugin jax-cuda12-pjrt jax-cuda13-plugin jax-cuda13-pjrt

# The H200 programs that tests count are those of this one compiler, which needs no GPU. It stays in
# the test environment: where people train, JAX would try to start it.
JAXLIB := 0.10.2

# The versions of JAX that we support; the later ones need Python 3.12.
MATRIX := 0.10 0.11 0.12
PYTHON312 ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null || \
	ls -d $(HOME)/.pyenv/versions/3.12.*/bin/python 2>/dev/null | tail -1)

# What the benchmarks compare with. Not into the environment: DeepMind's jmp has our import name.
PEERS := jmp==0.0.4 mixed-precision-for-JAX==0.1.8

# Published models to try autocast on; transformers 4 and diffusers 0.35 are the last with Flax.
PUBLISHED := 'transformers==4.57.*' 'diffusers==0.35.*' 'keras==3.15.*' jraph==0.0.6.dev0 \
	'e3nn-jax==0.21.*' 'dm-haiku==0.0.17' 'diffrax==0.7.*' 'equinox==0.13.*'

# Of a release: LINKS and IMAGES are addresses that stand before the relative links of the README.
LINKS ?=
IMAGES ?=

.PHONY: help train setup test test-matrix bench public-models package lint types clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/'

train: .venv/installed$(CUDA)  ## Install what training needs and compare precisions on real data; 3 minutes.
	.venv/bin/python examples/digits.py --seeds 3

# A file stays in one process, which keeps what it compiled. In the order of the alphabet, for the
# other order, by the number of tests, leaves slow files of few tests for the end.
IN_PARALLEL := -q -n auto --dist loadfile --no-loadscope-reorder

setup: .venv-test/installed  ## Install what development needs into .venv-test.

test: .venv-test/installed  ## Run what a change may break, in an environment of its own; five minutes.
	JAX_PLATFORMS=cpu .venv-test/bin/python -m pytest --core $(IN_PARALLEL)

# What differs between versions of JAX is met by these; `make test-matrix` runs all on each version.
ON_NEWEST := --core tests/test_properties.py tests/adapters/test_nnx.py \
	tests/autocasting/test_autocast_interface.py tests/autocasting/test_autocast_loops.py \
	tests/autocasting/test_autocast_transformations.py tests/autocasting/test_newer_forms.py

.PHONY: test-all
test-all: docs targets  ## Run every test: also programs for GPUs and TPUs, the site, the newest JAX; twenty minutes.
	JAX_PLATFORMS=cpu .venv-test/bin/python -m pytest $(IN_PARALLEL)
	JAX_PLATFORMS=cpu .venv-jax-0.12/bin/python -m pytest $(IN_PARALLEL) $(ON_NEWEST)
	@echo "Every test ran on JAX $(JAXLIB), a part of them on JAX 0.12. Left to others:" \
		"make test-matrix (every test on each version), make public-models."

.PHONY: quick quick-list
quick: .venv-test/installed  ## Run what belongs to FILE=jmp/trees.py, or to what git diff touches; half a minute.
	JAX_PLATFORMS=cpu .venv-test/bin/python -m tests.quick $(FILE)

quick-list: .venv-test/installed  ## Measure again which tests belong to which file; ten minutes.
	JAX_PLATFORMS=cpu .venv-test/bin/python -m tests.quick --write

test-matrix: $(MATRIX:%=.venv-jax-%/installed)  ## Run every test on every version of JAX that we support.
	for version in $(MATRIX); do \
		echo "JAX $$version"; \
		JAX_PLATFORMS=cpu .venv-jax-$$version/bin/python -m pytest $(IN_PARALLEL) || exit 1; \
	done

bench: .venv-test/installed benchmarks/peers/installed  ## Count and time everything that needs no GPU; an hour.
	.venv-test/bin/python -m benchmarks.run --suite compiled
	.venv-test/bin/python -m benchmarks.run --suite wire
	.venv-test/bin/python -m benchmarks.run --suite programs
	.venv-test/bin/python -m benchmarks.report

.PHONY: targets
targets: .venv-targets/installed .venv-jax-0.12/installed  ## Install the compilers for TPUs and of the newest JAX, which need no device.

.PHONY: docs # beside the folder of that name
docs: .venv-test/docs  ## Build the documentation into site/; a warning is an error.
	NO_MKDOCS_2_WARNING=1 .venv-test/bin/python -m mkdocs build --strict

public-models: .venv-published/installed .venv-test/installed  ## Try autocast on models that others published; an hour.
	.venv-published/bin/python -m benchmarks.public_models
	.venv-test/bin/python -m benchmarks.report

package: .venv-test/installed  ## Build wheel and sdist into dist/ and try them in a clean environment.
	.venv-test/bin/python -m tests.project.package $(if $(LINKS),--links $(LINKS) --images $(IMAGES))

.venv-published/installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-published
	.venv-published/bin/pip install --quiet -e '.[flax]' rich tabulate \
		jax==$(JAXLIB) jaxlib==$(JAXLIB) $(PUBLISHED)
	touch $@

# Where people train or test, JAX would look for a TPU.
.venv-targets/installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-targets
	.venv-targets/bin/pip install --quiet -e '.[flax,equinox,haiku]' \
		'jax[tpu]==$(JAXLIB)' jaxlib==$(JAXLIB)
	touch $@

benchmarks/peers/installed: Makefile | .venv-test/installed
	.venv-test/bin/pip install --quiet --no-deps --upgrade --target benchmarks/peers $(PEERS)
	touch $@

lint: .venv-test/installed  ## Check style.
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .

types: .venv-test/installed  ## Check types.
	.venv-test/bin/mypy
	.venv-test/bin/python -m tests.project.printed_programs

.venv-jax-%/installed: pyproject.toml
	$(if $(filter 0.10,$*),$(PYTHON),$(or $(PYTHON312),$(error Python 3.12 was not found; name it: make test-matrix PYTHON312=...))) -m venv .venv-jax-$*
	.venv-jax-$*/bin/pip install --quiet -e '.[test]' 'jax==$*.*' 'jax-cuda12-pjrt==$*.*'
	touch $@

clean:  ## Remove the environments and caches.
	rm -rf .venv .venv-test .venv-jax-* .venv-published .venv-targets benchmarks/peers build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	rm -rf site

# One choice of CUDA at a time: a plugin left from another choice would still be found, also by CUDA=.
.venv/installed$(CUDA): pyproject.toml
	@echo "Installing JAX and what the examples need into .venv: about a minute."
	$(PYTHON) -m venv .venv
	rm -f .venv/installed*
	.venv/bin/pip uninstall -qq --yes $(CUDA_PLUGINS)
	.venv/bin/pip install --progress-bar=off -e '.[$(TRAIN_EXTRAS)]'
	touch $@

.venv-test/installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/pip install --quiet -e '.[dev]' \
		jax==$(JAXLIB) jaxlib==$(JAXLIB) jax-cuda12-pjrt==$(JAXLIB)
	touch $@

# The tests need none of it, but those of the site, once that is built.
.venv-test/docs: .venv-test/installed
	.venv-test/bin/pip install --quiet -e '.[docs]' jax==$(JAXLIB) jaxlib==$(JAXLIB)
	touch $@
