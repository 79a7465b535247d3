"""One window of micro-batches: a loop that adds up scaled gradients, and the mean of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp.dtypes import at_least_float32
from jmp.loss_scaling import _micro_batches
from jmp.loss_scaling._agreement import agreed
from jmp.loss_scaling._base import LossScale, multiply_tree
from jmp.sharding._axes import made_varying, mapped_axes, varying_axes
from jmp.trees import PyTree, all_finite, is_complex, is_floating


class _Term(NamedTuple):
    """What one micro-batch adds, beside its gradients."""

    value: jax.Array
    counted: jax.Array | None  # None: each micro-batch counts one
    aux: Any


class Window(NamedTuple):
    """What `accumulated_value_and_grad` was given, checked.

    Attributes:
      fun: returns `(scaled loss, (loss, aux))`.
      skips_each: whether a bad micro-batch is left out, instead of the window.
      dtype: of the sums.
      axes: those to reduce over.
    """

    fun: Callable[..., tuple[jax.Array, tuple[jax.Array, Any]]]
    loss_scale: LossScale
    steps: int
    argnums: int | Sequence[int]
    weight: Callable[..., Any] | None
    skips_each: bool
    dtype: np.dtype
    axes: tuple[str, ...]

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[int]
    ) -> tuple[jax.Array, Any, PyTree]:
        """Returns the mean value, the stacked aux and the mean of the scaled gradients."""
        if self.steps == 1 and self.weight is None and not self.axes:
            differentiate = jax.value_and_grad(self.fun, self.argnums, has_aux=True)
            (_, (value, aux)), gradients = differentiate(*args, **kwargs)
            return value, _stacked(aux), gradients

        numbers = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        whole = list(args)
        for number in numbers:  # or each turn would reduce the gradients of what does not vary
            whole[number] = _varying_along(self.axes, whole[number])
        batch = [args[place] for place in places]

        def turn(sums: PyTree, rows: Sequence[Any]) -> tuple[PyTree, _Term]:
            gradients, term = self._micro_batch(_filled(whole, places, rows), kwargs, rows)
            return jax.tree.map(jnp.add, sums, gradients), term

        if self.steps == 1:
            sums, term = self._micro_batch(whole, kwargs, batch)
            terms = _stacked(term)
        else:
            parameters = tuple(whole[number] for number in numbers)
            zeros = jax.tree.map(self._zeros, parameters)
            start = zeros[0] if isinstance(self.argnums, int) else zeros
            sums, terms = jax.lax.scan(turn, start, _micro_batches.split_rows(batch, self.steps))
        return self._mean(sums, terms)

    def _micro_batch(
        self, args: Sequence[Any], kwargs: dict[str, Any], rows: Sequence[Any]
    ) -> tuple[PyTree, _Term]:
        """Returns what a micro-batch adds to the gradients' sums, and to the rest."""
        count, power = None, None
        if self.weight is not None:
            count = _micro_batches.count_of(self.weight, rows)
            power = _micro_batches.power_of_two(count)

        def loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            scaled, rest = self.fun(*args, **kwargs)
            return scaled if power is None else scaled / power.astype(scaled.dtype), rest

        differentiate = jax.value_and_grad(loss, self.argnums, has_aux=True)
        (_, (value, aux)), gradients = differentiate(*args, **kwargs)
        good = None
        if self.skips_each:
            good = agreed(all_finite(gradients), self.loss_scale, "auto", apart=self.axes)
            count = jnp.float32(1) if count is None else count
        if power is not None:
            gradients = multiply_tree(gradients, power)
        gradients = jax.tree.map(lambda g: g.astype(self._dtype_of(g)), gradients)
        if good is not None:  # selected: a product with zero would keep what is not finite
            gradients, value, count = jax.tree.map(
                lambda leaf: jnp.where(good, leaf, jnp.zeros_like(leaf)), (gradients, value, count)
            )
        return gradients, _Term(value, count, aux)

    def _dtype_of(self, gradient: jax.Array) -> np.dtype:
        """Returns the dtype of the sums of a gradient, or of a parameter's gradient."""
        has_its_own = gradient.dtype == np.float64 or not is_floating(gradient)
        return gradient.dtype if has_its_own else self.dtype

    def _zeros(self, parameter: Any) -> jax.Array:
        parameter = jnp.asarray(parameter)
        return jnp.zeros_like(parameter, dtype=self._dtype_of(parameter))

    def _mean(self, sums: PyTree, terms: _Term) -> tuple[jax.Array, Any, PyTree]:
        """Returns the mean value, the stacked aux and the mean of the scaled gradients."""
        value = terms.value.sum()
        count = None if terms.counted is None else terms.counted.sum()
        if self.axes:
            sums, value, count = jax.lax.psum((sums, value, count), self.axes)
        if count is None:
            count = jnp.float32(self.steps * _micro_batches.devices_along(self.axes))
        value, gradients = jax.tree.map(lambda total: _divided(total, count), (value, sums))
        return value, terms.aux, gradients


def _filled(args: Sequence[Any], places: Sequence[int], rows: Sequence[Any]) -> list[Any]:
    """Returns the arguments with a micro-batch in the places of the batch."""
    filled = list(args)
    for place, given in zip(places, rows, strict=True):
        filled[place] = given
    return filled


def _stacked(tree: PyTree) -> PyTree:
    """Returns a tree as a loop of one turn stacks it."""
    return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), tree)


def _varying_along(axes: Sequence[str], tree: PyTree) -> PyTree:
    """Returns parameters whose gradients shard_map leaves to each device, along `axes`."""

    def cast(leaf: Any) -> Any:
        missing = set(mapped_axes()) & set(axes) - varying_axes(leaf)
        return made_varying(leaf, tuple(sorted(missing)))

    return jax.tree.map(cast, tree)


def _divided(total: jax.Array, count: jax.Array) -> jax.Array:
    """Returns a sum over a count, in at least float32."""
    if is_complex(total):
        count = count.astype(total.real.dtype)
        return jax.lax.complex(total.real / count, total.imag / count)
    total = total.astype(at_least_float32(total.dtype))
    return total / count.astype(total.dtype)
