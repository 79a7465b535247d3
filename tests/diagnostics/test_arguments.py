"""What all diagnostics of a function share: arguments of any kind, and options with names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp import diagnostics

F16 = "mixed_float16"
TOOLS = {  # how each is asked about a loss with something beside it
    "compare": lambda loss: diagnostics.compare(loss, F16, has_aux=True),
    "gradient_report": lambda loss: diagnostics.gradient_report(loss, F16, has_aux=True),
    "memory_report": lambda loss: diagnostics.memory_report(loss, F16, has_aux=True),
    "precision_report": lambda loss: diagnostics.precision_report(loss, F16),
    "find_nonfinite": diagnostics.find_nonfinite,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_arguments_of_any_kind_reach_the_function(tool):
    def loss(state, x, key, rows, table, name, activation, nothing, *, weight):
        assert (name, nothing, weight) == ("head", None, 0.5) and table.dtype.kind == "U"
        assert state["step"].dtype == rows.dtype == jnp.int32
        noise = jax.random.normal(key, x.shape, x.dtype)
        y = activation((noise + x) @ state["w"]) * state["gain"]
        return weight * jnp.mean(y[rows]), {"step": state["step"] + 1, "key": key}

    state = {"w": jnp.ones((8, 8)), "gain": 2.0, "step": jnp.int32(3), "no": None}
    swapped, rows = np.ones((4, 8), ">f4"), np.array([0, 2], ">i4")
    args = (state, swapped, jax.random.key(2), rows, np.array(["a"]), "head", jnp.tanh, None)
    found = TOOLS[tool](loss)(*args, weight=0.5)
    assert str(found) if tool != "find_nonfinite" else found is None
    kinds = {"compare": "kind", "gradient_report": "role"}
    if tool in kinds:
        paths = [row.path for row in found.rows if getattr(row, kinds[tool]) == "gradient"]
        assert paths == ["w"]


@pytest.mark.parametrize(
    "tool", ["compare", "memory_report", "gradient_report", "precision_report", "find_float32"]
)
def test_an_option_that_does_not_exist_is_named_with_the_tool(tool):
    with pytest.raises(TypeError, match=rf"^{tool} got 'rule', no option .*: {tool}\("):
        getattr(diagnostics, tool)(len, "mixed_float16", rule=[])
