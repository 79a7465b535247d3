"""The tool that compares what autocast makes of random programs between two states of jmp."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jmp
from benchmarks import _plan_sources, plan_sample
from benchmarks._program_texts import names_of_package, program_text, without_names

pytestmark = pytest.mark.full

# Sources that draw no parameters of models: a second, not ten.
QUICK = ("planned", "operations", "chains", "graphs", "nests", "sharded")


@pytest.fixture
def quick_sources(monkeypatch):
    chosen = {name: _plan_sources.SOURCES[name] for name in QUICK}
    monkeypatch.setattr(_plan_sources, "SOURCES", chosen)


def written(path):
    plan_sample.write(path, 2)
    return path


def compared(*paths):
    """Whether two files agree, and what is said of it."""
    told = []
    return plan_sample.compare(*paths, tell=told.append), "\n".join(told)


@pytest.mark.usefixtures("quick_sources")
def test_the_same_programs_are_equal_and_another_decision_is_found(tmp_path, monkeypatch):
    first, again = (written(tmp_path / f"{name}.gz") for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()
    is_equal, told = compared(first, again)
    assert is_equal and told.endswith(f"all: {len(QUICK)} of {len(QUICK)} programs are equal")
    autocast = jmp.autocast
    otherwise = lambda *args, **options: autocast(*args, **options | {"full": ["dot_general"]})
    monkeypatch.setattr(jmp, "autocast", otherwise)
    is_equal, told = compared(first, written(tmp_path / "otherwise.gz"))
    assert not is_equal
    assert "differs in: forward, gradient" in told and "\n-v" in told and "\n+v" in told


def test_a_text_has_each_equation_and_no_address_or_name_of_ours():
    @functools.partial(jax.jit, donate_argnums=0)  # another would be planned as if it were none
    def users(x):
        return jax.nn.softmax(x @ x)

    program = jmp.autocast(lambda x: users(x) @ x, "mixed_float16", recompute="all")
    text = program_text(jax.make_jaxpr(program)(jnp.ones((8, 8))))
    assert "name=users" in text and "dot_general[" in text and "float16[8,8]" in text
    assert "0x" not in text and "jmp." not in text and str(plan_sample.ROOT) not in text
    assert "name=users" in without_names(text, names_of_package())
