"""The planner: the dtype of every value of one level of nesting, and the steps that compute them.

Planning traces nothing. Depth by depth, each connected component of fusible nodes becomes either an
island (see `_islands`) or, where no node requires float32, a run of single half operations; each
barrier is decided by its rule; what nests is planned by its kind, which hands back its dtypes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from functools import cached_property, partial
from typing import Any

import numpy as np

from jmp import _jax_compat
from jmp.autocasting import _islands, _lowerings, _sending
from jmp.autocasting._facts import Destination, Info, compared_values
from jmp.autocasting._flatten import graph_of
from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._islands import UNBOUNDED, why_float32, why_region
from jmp.autocasting._kinds import has_kind, kind_of
from jmp.autocasting._level import Level
from jmp.autocasting._magnitudes import Magnitude, magnitude_of_sums
from jmp.autocasting._numbers import ValueProvenance, dtype_of
from jmp.autocasting._precision import why_not_lowered
from jmp.autocasting._registry import DTYPE_PARAMS, Category
from jmp.autocasting._request import Request
from jmp.autocasting._shared_traces import sharing_functions
from jmp.autocasting._steps import Arithmetic, Context, Plan, Read, Single, Step, runnable_order
from jmp.dtypes import FLOAT32

# A product whose result is so many times smaller than an operand leaves it float32.
SMALL_BESIDE = 16
WHY_SMALL = "its result is small, and stays the float32 that it was added up in"
WHY_ROWS = "rows of a float32 table, rounded after the lookup"
WHY_ASKED = "the user asked for its result in the float32 that it was added up in"


def plan_program(closed: Any, in_half: Sequence[bool], request: Request) -> Plan:
    """Returns the plan of a program.

    Args:
      closed: its closed jaxpr.
      in_half: which of its arguments are rounded when they come in.
    """
    jaxpr, constants = _jax_compat.open_jaxpr(closed)
    graph = graph_of(jaxpr, constants, [ValueProvenance.INPUTS] * len(in_half), None, request)
    rounded = Info(request.settings.compute_dtype, False)
    are_rounded = [*(False for _ in constants), *in_half]
    infos = [
        rounded if is_rounded and value.is_float32 else Info(value.dtype, True)
        for value, is_rounded in zip(graph.inputs, are_rounded, strict=True)
    ]
    nowhere = [Destination(feeds=False, carried=False)] * len(graph.outputs)
    return Planner(graph, infos, nowhere, Context(request)).plan_level()


class Planner(Level):
    """Plans one level; what is known of it stands in `Level`."""

    def plan_level(self) -> Plan:
        """Returns the plan: neutral nodes first, then by depth components and barriers."""
        sent = _sending.find_sent(self)
        steps: list[Step] = []
        fusible, barriers = defaultdict[int, list[Node]](list), defaultdict[int, list[Node]](list)
        for node in self.graph.nodes:
            if node not in self.facts.depths:
                self.magnitudes.measure(node)
                steps.append(self._neutral(node, node in sent))
            else:
                is_barrier = not node.is_fusible or node in self.facts.embeddings
                (barriers if is_barrier else fusible)[self.facts.depths[node]].append(node)
        for depth in sorted({*fusible, *barriers}):
            for node in (*fusible[depth], *barriers[depth]):
                self.magnitudes.measure(node)
            for nodes in _islands.group(fusible[depth], self.facts.cuts):
                steps += _islands.plan_component(nodes, self)
            steps += map(self._barrier, barriers[depth])
        for each in self.context.request.target.passes:
            steps = list(each.run(steps, self))
        reads = tuple(self.dtypes[value] for value in self.graph.inputs)
        ordered = tuple(sharing_functions(runnable_order(steps, self.graph.outputs)))
        infos = tuple(map(self.info, self.graph.outputs))
        return Plan(self.graph, reads, ordered, infos, self.context.request)

    # Nodes by themselves.

    def by_itself(self, node: Node) -> Step:
        """Returns the step of a node that is no barrier and stands in no island."""
        if node.rule.category is Category.AS_WRITTEN:
            return self._single(node, Arithmetic.FLOAT32)
        if has_kind(node.name) and not kind_of(node.name).runs_as_written:
            return kind_of(node.name).plan(node, self)
        return self._single(node, _half_arithmetic(node))

    # Barriers.

    def _barrier(self, node: Node) -> Step:
        category = node.rule.category
        if node.goes_inside:
            return kind_of(node.name).plan(node, self)
        if node in self.facts.embeddings:
            return self._embedding(node)
        if node.region.in_float32 or category in (Category.FULL, Category.AS_WRITTEN):
            single = self._single(node, Arithmetic.FLOAT32, why_region(node))
            if node.region.in_float32 or not node.rule.rounds or self._reads_products(node):
                return single
            writes = [self.write_of(value, {node}) for value in node.outputs]
            return single._replace(stores=tuple(write.dtype for write in writes))
        if category is Category.LOW:
            if why := why_not_lowered(node, self.half):
                return self._single(node, Arithmetic.FLOAT32, why)
            return self._product(node)
        # Neutral operands by themselves do not make it half.
        is_led = any(v in self.facts.dependent and self.is_half(v) for v in node.inputs)
        is_half = is_led and not why_float32(node, set(), self)
        return self._single(node, _half_arithmetic(node) if is_half else Arithmetic.FLOAT32)

    def _reads_products(self, transform: Node) -> bool:
        """Returns whether a Fourier transform reads a product of spectra that were computed.

        It then sums as many products as there are numbers, as in an autocorrelation.
        """

        def spectra_of(value: Value) -> list[Value]:
            return [] if value.producer is None else _complex(value.producer.inputs)

        for value in reached(_complex(transform.inputs), spectra_of):
            computed = self.facts.dependent & set(spectra_of(value))
            if len(computed) > 1 and value.producer and not value.producer.rule.linear:
                return True
        return False

    def _embedding(self, node: Node) -> Single:
        """Returns a lookup whose rows are half, unless nothing bounds them."""
        held = (self.magnitudes[v] for v in (node.inputs[0], *node.outputs))  # it may fill in more
        if any(each.exceeds_half for each in held):
            return self._single(node, Arithmetic.FLOAT32, UNBOUNDED)
        return self._single(node, Arithmetic.ROUNDED, WHY_ROWS)

    def _product(self, node: Node) -> Single:
        """Returns a half product; its result is float32 if sums need it."""
        magnitudes = [self.magnitudes[value] for value in node.inputs]
        single = self._single(node, Arithmetic.HALF)
        offset = any(magnitude.is_coarse(self.half) for magnitude in magnitudes)
        single = single._replace(reads_offset=offset)
        why = self._why_float32_result(node, magnitudes)
        if not why:
            return single
        self.store(node.outputs, (FLOAT32,))
        is_dot = node.name == "dot_general"
        lowering = _lowerings.multiply_in_half if is_dot else _lowerings.multiply_to_float32
        return single._replace(why=f"{single.why}; {why}", stores=(FLOAT32,), lowering=lowering)

    def _why_float32_result(self, product: Node, magnitudes: Sequence[Magnitude]) -> str:
        """Returns why the result of a half product is float32; "" if it is half."""
        if product.region.keeps_results and "preferred_element_type" in product.params:
            return WHY_ASKED
        if product.name != "dot_general":
            return ""
        sums = magnitude_of_sums(product, *magnitudes)
        if not (sums.exceeds_half and self._may_keep_sums(product)):
            return ""
        self.magnitudes[product.outputs[0]] = sums
        return WHY_SMALL

    def _may_keep_sums(self, product: Node) -> bool:
        """Returns whether a result that float16 may not hold stays the float32 it is added up in.

        That is where it is small beside what the product reads, such as a sum over all tokens, so
        that it costs next to nothing. Not that of a layer: it is a value like all others of a
        network, and small where the batch is. Nor scores of an attention: where one token is
        decoded they would be rounded otherwise than in a prefill.
        """
        (result,) = product.outputs
        computed = [value for value in product.inputs if value in self.facts.dependent]
        largest = max((value.size for value in computed), default=0)
        is_small = result.size * SMALL_BESIDE <= largest
        is_layer = any(v.varies and v not in self.facts.dependent for v in product.inputs)
        in_float8 = product.region.multiplies_in_float8
        if self.half != np.float16 or not is_small or is_layer or in_float8:
            return False
        return result not in self._scores and not self.is_multiplied(result, result.users)

    # Single equations, and how they read.

    def _neutral(self, node: Node, is_sent: bool) -> Single:
        if not is_sent or node.region.reduces_in_float32:  # `widen_gradients` lowers the latter
            return self._single(node, Arithmetic.FLOAT32, why_region(node))
        is_first = _sending.sends(node) and not any(map(self.is_half, node.inputs))
        single = self._single(node, Arithmetic.HALF, _sending.WHY_SENT)
        return single._replace(lowering=_lowerings.send_in_half) if is_first else single

    def _single(self, node: Node, arithmetic: Arithmetic, why: str = "") -> Single:
        params = {**node.params}
        if arithmetic is Arithmetic.HALF:
            reads = tuple([self._read_half(node, value) for value in node.inputs])
            is_half = any(value.is_float32 for value in node.outputs)  # a callback has none
            params |= {name: self.half for name in DTYPE_PARAMS if is_half and name in params}
        else:
            reads = tuple([Read(v, FLOAT32 if v.is_float32 else None) for v in node.inputs])
        if arithmetic is Arithmetic.FLOAT32:
            stores = tuple([self.rounded_by_rule(v) or v.dtype for v in node.outputs])
        else:
            stores = tuple([self.half if v.is_float32 else v.dtype for v in node.outputs])
        self.store(node.outputs, stores)
        masks = tuple(i for i, read in enumerate(reads) if read.saturates and node.rule.linear)
        lowering = partial(_lowerings.add_masks, masks) if masks else None
        return Single(node, arithmetic, why or node.rule.reason, reads, params, stores, lowering)

    def _read_half(self, node: Node, value: Value) -> Read:
        """Returns how an operand is read in half.

        One that the operation repeats is repeated in float32 first: the derivative of that is a
        sum, and were the operand rounded before, a bias would add up its gradient in half (16384
        ones give 2048 in float16). One that may be a mask is then held within float16's range.
        """
        if not value.is_float32:
            return Read(value, None)
        repeats = node.rule.elementwise and value.size < node.outputs[0].size
        shape = node.outputs[0].aval.shape if repeats and value.varies else None
        return Read(value, self.half, shape, self.is_mask_of(node, value))

    @cached_property
    def _scores(self) -> Set[Value]:
        """The values that reach a maximum on this level, such as that of a softmax."""
        return compared_values(self.graph, [])


def _complex(values: Iterable[Value]) -> list[Value]:
    return [v for v in values if np.issubdtype(dtype_of(v) or np.bool_, np.complexfloating)]


def _half_arithmetic(node: Node) -> Arithmetic:
    return Arithmetic.ROUNDED if node.rule.sums_backward else Arithmetic.HALF
