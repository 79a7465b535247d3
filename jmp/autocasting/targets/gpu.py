"""Programs for GPUs: the passes, and the smallest of them.

Programs for a CPU are planned as those for GPUs, so that tests without one see the same program.
"""

from jmp.autocasting._kinds import Level
from jmp.autocasting._passes import HardwareTarget, Pass, register_target
from jmp.autocasting._steps import Island, Recompute, on_islands
from jmp.autocasting.attention import fuse_attentions
from jmp.autocasting.float8 import multiply_in_float8, send_in_float8, with_bounds
from jmp.autocasting.targets._one_pass import sums_in_one_pass
from jmp.autocasting.targets._padding import pad_softmaxes
from jmp.autocasting.targets._pick import pick_as_sum
from jmp.autocasting.targets._rewriting import rewriting
from jmp.autocasting.targets._softmax import softmax_from_half_result


@on_islands
def keep_apart(island: Island, level: Level) -> Island:
    """Returns an island; if it is elementwise, its recomputation stands behind a barrier.

    XLA would merge the recomputation with the forward pass, and keep the float32 results. Behind
    the barrier nothing fuses. XLA keeps islands that reduce rows apart by itself. On TPUs a barrier
    always costs more than it saves, because arithmetic takes time there.
    """
    is_recomputed = island.recompute is Recompute.RECOMPUTE
    if not is_recomputed or any(node.rule.reduces for node in island.nodes):
        return island
    return island._replace(prevent_cse=level.context.prevent_cse)


GPU = HardwareTarget(
    "gpu",
    (
        # Sending depends on which products are float8. Bounds come last, so that they see no steps
        # that a fused attention replaces.
        Pass("float8 products", "operands and gradients of products", multiply_in_float8),
        Pass("float8 is sent", "", send_in_float8),
        rewriting("pick as a sum", "", pick_as_sum),
        rewriting("softmax from its half result", "gradients of scores", softmax_from_half_result),
        rewriting("rows in one pass", "sums of exponentials", sums_in_one_pass),
        Pass("prevent_cse", "", keep_apart),
        Pass("fused attention", "attentions and their gradients", fuse_attentions),
        Pass("padded softmax", "sums over rows, in another order", pad_softmaxes),
        Pass("float8 bounds", "the scales of float8 products", with_bounds),
    ),
)

register_target(["gpu", "cpu"], GPU)
