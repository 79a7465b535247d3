"""Orders of optax transformations, by name: those that are refused, and some that are right."""

import optax

import jmp
from jmp import transforms


def scaled(inner=None):
    return transforms.with_loss_scale(inner or optax.sgd(0.1), jmp.DynamicLossScale(1024.0))


def mastered():
    return transforms.with_master_params(optax.sgd(0.1))


BEFORE = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), scaled()),
    "named_chain": optax.named_chain(("scaling", optax.zero_nans()), ("last", scaled())),
    "chain in a chain": optax.chain(optax.chain(optax.clip(1.0)), optax.chain(scaled())),
    "chain with a part behind": optax.chain(optax.clip(1.0), scaled(), optax.scale(0.5)),
}
INSIDE = {
    "apply_if_finite": optax.apply_if_finite(scaled(), 3),
    "conditionally_mask": optax.conditionally_mask(scaled(), lambda step: step > 1),
    "conditionally_transform": optax.conditionally_transform(scaled(), lambda step, **_: step > 1),
    "contrib.sam": optax.contrib.sam(scaled(), optax.sgd(0.1)),
    "contrib.schedule_free": optax.contrib.schedule_free(scaled(), 0.1),
    "inject_stateful_hyperparams": optax.inject_hyperparams(lambda rate: scaled(optax.sgd(rate)))(
        rate=0.1
    ),
    "MultiSteps": optax.MultiSteps(scaled(), 2),
}
MASKED = {
    "partition": optax.partition(
        {"half": scaled(), "float32": optax.sgd(0.1)}, {"a": "half", "b": "float32"}
    ),
    "masked": optax.masked(scaled(), {"a": True, "b": False}),
}
AFTER_MASTERS = {
    "chain": optax.chain(mastered(), optax.scale(0.5)),
    "named_chain": optax.named_chain(("z", mastered()), ("a", optax.scale(0.5))),
}
AROUND_MASTERS = {
    "lookahead": optax.lookahead(mastered(), 2, 0.5),
    "contrib.schedule_free": optax.contrib.schedule_free(mastered(), 0.1),
    "contrib.mechanic": optax.contrib.mechanize(mastered()),
    "apply_if_finite": optax.apply_if_finite(mastered(), 3),
    "conditionally_mask": optax.conditionally_mask(mastered(), lambda step: step > 1),
}
RIGHT_AROUND_MASTERS = {
    "MultiSteps": optax.MultiSteps(mastered(), 2).gradient_transformation(),
    "partition": optax.partition({"x": mastered(), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}),
    "masked": optax.masked(mastered(), {"a": True, "b": False}),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda rate: transforms.with_master_params(optax.sgd(rate))
    )(rate=0.1),
    "contrib.sam": optax.contrib.sam(mastered(), optax.sgd(0.1)),
    "flatten": optax.flatten(mastered()),
}
MOVING_TAIL = {
    "Adam": optax.chain(scaled(optax.identity()), optax.adam(0.1)),
    "a schedule": optax.chain(scaled(), optax.scale_by_schedule(lambda count: 1.0)),
    "a part of a chain": optax.chain(scaled(), optax.chain(optax.identity(), optax.trace(0.9))),
    "named_chain": optax.named_chain(("z", scaled()), ("a", optax.trace(0.9))),
}
REFUSED = (BEFORE, INSIDE, MASKED, AFTER_MASTERS, AROUND_MASTERS, MOVING_TAIL)
STILL_TAIL = optax.chain(scaled(), optax.add_decayed_weights(0.1), optax.scale(1.0))
