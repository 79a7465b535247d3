"""Graph networks: those of jraph with Haiku's layers, and e3nn's, which turn with the molecule."""

import functools
from collections.abc import Callable
from typing import Any

import e3nn_jax as e3nn
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from benchmarks.published import Model, Row
from benchmarks.published._losses import masked_entropy
from jmp.adapters import haiku, linen

CLASSES = 8
NODES, EDGES, GRAPHS = 24, 80, 3


def batch_of_graphs() -> jraph.GraphsTuple:
    """Returns two random graphs, padded as jraph's examples pad theirs."""
    numbers = np.random.default_rng(0)

    def graph(nodes: int, edges: int) -> jraph.GraphsTuple:
        return jraph.GraphsTuple(
            nodes=numbers.normal(size=(nodes, 16)).astype(np.float32),
            edges=numbers.normal(size=(edges, 8)).astype(np.float32),
            senders=numbers.integers(0, nodes, edges),
            receivers=numbers.integers(0, nodes, edges),
            globals=numbers.normal(size=(1, 4)).astype(np.float32),
            n_node=np.array([nodes]),
            n_edge=np.array([edges]),
        )

    graphs = jraph.batch([graph(8, 20), graph(12, 40)])
    return jax.tree.map(jnp.asarray, jraph.pad_with_graphs(graphs, NODES, EDGES, GRAPHS))


def make(network: Callable[[Any], Any]) -> Model:
    transformed = hk.without_apply_rng(hk.transform(network))
    graphs = batch_of_graphs()
    params = transformed.init(jax.random.key(0), graphs)
    labels = jax.random.randint(jax.random.key(1), (NODES,), 0, CLASSES)

    def call(apply: Any, params: Any, batch: Any) -> Any:
        return apply(params, batch["graphs"]).nodes

    def score(logits: Any, batch: Any) -> Any:
        mask = jraph.get_node_padding_mask(batch["graphs"])
        return masked_entropy(logits, batch["labels"], mask)

    return Model(transformed.apply, call, score, params, {"graphs": graphs, "labels": labels})


def adapter(apply: Callable[..., Any], policy: str) -> Callable[..., Any]:
    network = hk.Transformed(init=lambda *args: None, apply=apply)
    return haiku.autocast(network, policy).apply


def perceptron(*sizes: int) -> Callable[..., Any]:
    @jraph.concatenated_args
    def update(inputs: Any) -> Any:
        return hk.nets.MLP(sizes)(inputs)

    return update


def graph_network(graphs: Any) -> Any:
    for sizes in ((32, 32), (32, CLASSES)):
        graphs = jraph.GraphNetwork(*(perceptron(*sizes) for _ in range(3)))(graphs)
    return graphs


def interaction_network(graphs: Any) -> Any:
    update_edges, update_nodes = perceptron(32, 16), perceptron(32, CLASSES)
    return jraph.InteractionNetwork(update_edges, update_nodes)(graphs)


def graph_convolution(graphs: Any) -> Any:
    for size in (32, CLASSES):
        graphs = jraph.GraphConvolution(hk.Linear(size), add_self_edges=True)(graphs)
    return graphs


def graph_attention(graphs: Any) -> Any:
    for size in (32, CLASSES):
        graphs = jraph.GAT(
            lambda nodes, size=size: hk.Linear(size)(nodes),
            lambda sent, received, edges: hk.Linear(1)(
                jax.nn.leaky_relu(jnp.concatenate([sent, received], axis=1))
            ),
        )(graphs)
    return graphs


class Tetris(nn.Module):
    """The network of e3nn-jax's example that tells pieces of Tetris apart, in Flax.

    Its tensor products mix features with the directions to the neighbours.
    """

    @nn.compact
    def __call__(self, positions: Any, senders: Any, receivers: Any) -> Any:
        vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        harmonics = e3nn.spherical_harmonics([1, 2, 3], vectors, True)
        nodes = e3nn.IrrepsArray("0e", jnp.ones((len(positions), 1)))
        for irreps in ("32x0e + 32x0o + 8x1e + 8x1o + 8x2e + 8x2o", "0o + 7x0e"):
            nodes = e3nn.flax.Linear(irreps)(nodes) if nodes.irreps.dim > 1 else nodes
            messages = e3nn.concatenate(
                [nodes[senders], e3nn.tensor_product(nodes[senders], harmonics)]
            )
            lengths = e3nn.norm(vectors).array
            radial = e3nn.bessel(lengths[:, 0], 8, 3.0)
            mix = e3nn.flax.MultiLayerPerceptron((32, messages.irreps.num_irreps), jax.nn.silu)
            messages = messages.regroup() * mix(radial)
            nodes = e3nn.scatter_sum(messages, dst=receivers, output_size=len(positions)) / 1.5
            nodes = e3nn.gate(e3nn.flax.Linear(_with_gates(irreps))(nodes))
        return e3nn.sum(nodes, axis=0).array


def _with_gates(irreps: str) -> Any:
    found = e3nn.Irreps(irreps)
    gated = found.filter(drop="0e + 0o")
    return found.filter(keep="0e + 0o") + e3nn.Irreps(f"{gated.num_irreps}x0e") + gated


def tetris() -> Model:
    shapes = [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 1, 0], [0, 1, 2], [2, 1, 0]]
    positions = jnp.array(shapes, jnp.float32) + 0.1 * jax.random.normal(jax.random.key(1), (6, 3))
    senders, receivers = (jnp.array(side) for side in np.nonzero(~np.eye(6, dtype=bool)))
    batch = {"positions": positions, "senders": senders, "receivers": receivers}
    network = Tetris()
    variables = network.init(jax.random.key(0), **batch)

    def call(apply: Any, params: Any, batch: Any) -> Any:
        return apply(params, **batch)

    def score(logits: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array(3))

    return Model(network.apply, call, score, variables, batch)


ROWS = (
    *(
        Row(name, title, functools.partial(make, network), adapter=adapter)
        for name, title, network in (
            ("jraph-graph-network", "jraph.GraphNetwork", graph_network),
            ("jraph-interaction", "jraph.InteractionNetwork", interaction_network),
            ("jraph-convolution", "jraph.GraphConvolution", graph_convolution),
            ("jraph-gat", "jraph.GAT", graph_attention),
        )
    ),
    Row("e3nn-tetris", "e3nn-jax, tensor products", tetris, adapter=linen.autocast),
)
