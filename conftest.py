"""Ground rules of tests and doctests: a CPU with eight devices, and no silent rank promotion."""

import collections
import contextlib
import ctypes
import functools
import gc
import itertools
import os
import pathlib
import shutil
import threading
from importlib.metadata import version

# Before JAX starts: the compiler for CUDA programs must not be taken for a GPU, and agreement
# between devices needs more than one of them. With JAX_PLATFORMS=cuda,cpu tests run on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# What takes the time of most tests is making programs that run once: LLVM optimises less, and no
# operation remembers which lines it came from. XLA's own passes, and with them every cast, stay as
# they are. To test with all optimisations: JAX_DISABLE_MOST_OPTIMIZATIONS=0 make test.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Where every core has a test process of its own, machine code that is made in parts for several
# threads takes more time in all.
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# The older of two ways to make machine code of a fusion compiles in half the time, and changes no
# cast. From JAX 0.11 on there is the newer one alone, and the flag is an error.
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# What was compiled for a CPU is kept for other processes, and for the next run, which takes half of
# the time where nothing has changed; the first takes 8 % less. `make clean` removes it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.abspath("build/compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir

import jmp
from jmp.autocasting import _kinds, _registry
from testbed import small_products
from tests.h200.fixture import h200 as h200

# Python would look through all of JAX's objects again and again: 7 % of the time.
gc.freeze()
gc.set_threshold(20_000, 20, 50)

# JAX makes a context of MLIR for each program, a sixth of the time of a small one: here 50 that
# follow one another have the same.
made, make_ir_context = itertools.count(), mlir.make_ir_context
shared_context = functools.lru_cache(maxsize=1)(lambda *_: make_ir_context())
mlir.make_ir_context = lambda: shared_context(threading.get_ident(), next(made) // 50)

jax.config.update("jax_numpy_rank_promotion", "raise")

# "suite" tries the same inputs each time, so that a change is judged by itself; "random" tries new
# ones each time, as CI does, and prints how to repeat a failure.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.register_profile("random", deadline=None, max_examples=40, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


# `make test` runs all tests but those marked `full`, with `--core`; without it everything runs.
left_out = collections.Counter[str]()  # tests by folder


def pytest_addoption(parser):
    parser.addoption("--core", action="store_true", help="what `make test` runs; else everything")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: a test that `make test` leaves to `make test-all`")


def pytest_sessionstart(session):
    is_first = not hasattr(session.config, "workerinput")  # of the processes of xdist
    kept = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if is_first and kept.exists() and sum(file.stat().st_size for file in kept.iterdir()) > 1e9:
        shutil.rmtree(kept)


def pytest_collection_modifyitems(config, items):
    if config.getoption("core"):
        left = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        left_out.update(folder_of(item.nodeid) for item in left)


def folder_of(nodeid):
    return "/".join(nodeid.partition("::")[0].split("/")[:-1][:2])


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a process of xdist's tells the one that prints
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if not left_out:  # each process has left out the same; one that crashed says nothing
        left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter, config):
    """Says in the last lines what ran, and what was left to the other command."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    ran = collections.Counter(folder_of(r.nodeid) for r in reports if r.when == "call")
    for title, counts in (("Ran", ran), ("Left to make test-all", left_out)):
        if counts:
            folders = ", ".join(f"{folder} {count}" for folder, count in sorted(counts.items()))
            terminalreporter.write_line(f"{title}: {counts.total():,} tests. {folders}.")


STATM = pathlib.Path("/proc/self/statm")  # of Linux: pages of memory, in all and in use
MUCH = 1.0e9  # bytes, at the end of a file
TOO_MUCH, TOO_MUCH_IN_CORE = 1.7e9, 1.35e9  # inside of one: a process of `make test` has 1.5 GB
MORE = 0.15e9  # than what is left, before it is looked at again: what is not given back stays


def pytest_collection_finish():
    gc.freeze()  # every test module of every process, which none gives back


@pytest.fixture(autouse=True)
def names_for_doctests(doctest_namespace, request):
    """Adds the names that every docstring's example may use without importing them.

    What the example's module defines itself comes first: an adapter's `autocast` is not `jmp`'s.
    """
    example = getattr(request.node, "dtest", None)
    given = {name: getattr(jmp, name) for name in jmp.__all__} | {"jax": jax, "jnp": jnp, "np": np}
    own = example.globs if example else {}
    doctest_namespace.clear()
    doctest_namespace.update({name: given[name] for name in given if name not in own})


@pytest.fixture(autouse=True)
def registered():
    """Takes back the rules and kinds that a test or a docstring's example registers."""
    tables = [(table, dict(table)) for table in (_registry._RULES, _kinds._KINDS)]
    yield
    for table, before in tables:
        if table != before:
            table.clear()
            table.update(before)


@pytest.fixture(autouse=True, scope="module")
def memory(request):
    """Forgets what a file has kept and compiled, if it is much: 5 GB for six of the largest."""
    yield
    for value in vars(request.module).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
    if not STATM.exists() or bytes_in_use() > MUCH:
        give_memory_back()


least_left = 0.0  # bytes, after memory was given back


@pytest.fixture(autouse=True)
def memory_within_a_file(request):
    """The same inside a file whose programs are many."""
    global least_left
    yield
    limit = TOO_MUCH_IN_CORE if request.config.getoption("core") else TOO_MUCH
    if STATM.exists() and bytes_in_use() > max(limit, least_left + MORE):
        give_memory_back()
        least_left = bytes_in_use()


def bytes_in_use():
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_memory_back():
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc alone
        trim(0)


@pytest.fixture
def quick_compilation():
    """Lets LLVM optimise less also where the environment asks for all optimisations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def users_rank_promotion():
    """Broadcasts between ranks as users' programs may."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def small_is_float8():
    """Lets small products be float8 too, until the test ends or closes it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_products.small_is_float8())
        yield stack


@pytest.fixture
def x64():
    """Lets JAX compute in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_promotion():
    """Refuses every implicit promotion between dtypes."""
    with jax.numpy_dtype_promotion("strict"):
        yield
