"""Every optimizer and gradient transformation of optax and optax.contrib, by name.

Left out are those that need gradients by example (`dpsgd`), the loss function in `init` (`sophia`)
or parameters of a kind of their own (`lookahead`).
"""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

RATE = 1e-2
KEY = jax.random.key(0)
MASK = {"kernel": True, "bias": False}
SGD = optax.sgd(RATE)

BY_RATE = """
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb
    lars lion nadam nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop
    rprop sgd sign_sgd signum sm3 yogi
""".split()
OF_CONTRIB_BY_RATE = """
    scale_by_madgrad acprop ademamix adopt dog galore madgrad momo momo_adam muon
    simplified_ademamix schedule_free_adamw schedule_free_sgd
""".split()
WITHOUT_ARGUMENTS = """
    centralize identity normalize_by_update_norm scale_by_adadelta scale_by_adam scale_by_adamax
    scale_by_adan scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients
    scale_by_factored_rms scale_by_lbfgs scale_by_lion scale_by_novograd
    scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms
    scale_by_radam scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev
    scale_by_trust_ratio scale_by_yogi set_to_zero keep_params_nonnegative zero_nans polyak_sgd
    scale_by_polyak
""".split()
OF_CONTRIB_WITHOUT_ARGUMENTS = """
    cocob dadapt_adamw dowg normalize prodigy scale_by_acprop scale_by_ademamix scale_by_adopt
    scale_by_cocob scale_by_simplified_ademamix
""".split()

TRANSFORMATIONS = {
    **{name: getattr(optax, name)(RATE) for name in BY_RATE},
    **{name: getattr(contrib, name)(RATE) for name in OF_CONTRIB_BY_RATE},
    **{name: getattr(optax, name)() for name in WITHOUT_ARGUMENTS},
    **{name: getattr(contrib, name)() for name in OF_CONTRIB_WITHOUT_ARGUMENTS},
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), SGD),
    "add_decayed_weights": optax.add_decayed_weights(0.1),
    "add_noise": optax.add_noise(0.1, 0.5, KEY),
    "apply_every": optax.apply_every(2),
    "apply_if_finite": optax.apply_if_finite(SGD, 3),
    "clip": optax.clip(0.1),
    "clip_by_block_rms": optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(RATE)),
    "conditionally_mask": optax.conditionally_mask(SGD, lambda step: step > 0),
    "conditionally_transform": optax.conditionally_transform(
        optax.adam(RATE), lambda s, **_: s > 0
    ),
    "ema": optax.ema(0.9),
    "flatten": optax.flatten(optax.adam(RATE)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.1, 3)),
    "masked": optax.masked(optax.adam(RATE), MASK),
    "mechanize": contrib.mechanize(optax.adam(RATE)),
    "noisy_sgd": optax.noisy_sgd(RATE, key=KEY),
    "partition": optax.partition({True: optax.adam(RATE), False: SGD}, MASK),
    "reduce_on_plateau": optax.chain(optax.adam(RATE), contrib.reduce_on_plateau()),
    "sam": optax.GradientTransformation(*contrib.sam(SGD, SGD, sync_period=2)),
    "lbfgs": optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(3)),
    "scale": optax.scale(-RATE),
    "scale_by_schedule": optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 5)),
    "schedule_free": contrib.schedule_free(optax.adam(RATE, b1=0.0), RATE),
    "skip_not_finite": optax.MultiSteps(SGD, 2, should_skip_update_fn=optax.skip_not_finite),
    "MultiSteps": optax.MultiSteps(optax.adam(RATE), 2),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(optax.adam(RATE)),
    "trace": optax.trace(0.9, nesterov=True),
}


def parameters():
    kernel = jax.random.normal(KEY, (3, 4), jnp.float32)
    return {"kernel": kernel, "bias": jnp.float32([0.5, -2.0, 1e-3, 3.0])}


def gradients(step):
    first, second = jax.random.split(jax.random.fold_in(KEY, step))
    kernel = jax.random.normal(first, (3, 4), jnp.float32)
    return {"kernel": kernel, "bias": 1e-3 * jax.random.normal(second, (4,), jnp.float32)}
