"""Checkpoints of one kind of run go on as another; a restore that cannot be right says why."""

import base64
import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import train_state

import jmp
from jmp import transforms
from jmp.adapters import linen
from testbed import migrations
from tests.bits import bits
from tests.commands import in_full

PARAMS = {"w": jnp.arange(4.0)}
DYNAMIC = jmp.DynamicLossScale(8.0, min_loss_scale=2.0, max_loss_scale=2.0**20)
ADAM = optax.adam(0.1)
SCALED = transforms.with_loss_scale(ADAM, DYNAMIC)
# DeepMind's jmp 0.0.4 wrote it: pickle.dumps of {"params": {"w": array([0, 1, 2])}, "loss_scale":
# DynamicLossScale(2**15, period=3) after the flags 1, 0, 1, 1, "static": StaticLossScale(512),
# "none": NoOpLossScale(), "policy": get_policy("p=f32,c=f16,o=f32")}, taken off the device.
DEEPMINDS = """
gASVgwIAAAAAAAB9lCiMBnBhcmFtc5R9lIwBd5SMFm51bXB5Ll9jb3JlLm11bHRpYXJyYXmUjAxfcmVjb25zdHJ1Y3SU
k5SMBW51bXB5lIwHbmRhcnJheZSTlEsAhZRDAWKUh5RSlChLAUsDhZRoB4wFZHR5cGWUk5SMAmY0lImIh5RSlChLA4wB
PJROTk5K/////0r/////SwB0lGKJQwwAAAAAAACAPwAAAECUdJRic4wKbG9zc19zY2FsZZSME2ptcC5fc3JjLmxvc3Nf
c2NhbGWUjBBEeW5hbWljTG9zc1NjYWxllJOUKYGUfZQoaBhoBmgJSwCFlGgLh5RSlChLASloE4lDBAAAgEaUdJRijAdj
b3VudGVylGgGaAlLAIWUaAuHlFKUKEsBKWgQjAJpNJSJiIeUUpQoSwNoFE5OTkr/////Sv////9LAHSUYolDBAIAAACU
dJRijAZwZXJpb2SUSwOMBmZhY3RvcpRLAowObWluX2xvc3Nfc2NhbGWUaAZoCUsAhZRoC4eUUpQoSwEpaBOJQwQAAIA/
lHSUYnVijAZzdGF0aWOUaBmMD1N0YXRpY0xvc3NTY2FsZZSTlCmBlH2UaBhoBmgJSwCFlGgLh5RSlChLASloE4lDBAAA
AESUdJRic2KMBG5vbmWUaBmMDU5vT3BMb3NzU2NhbGWUk5QpgZSMBnBvbGljeZSMD2ptcC5fc3JjLnBvbGljeZSMBlBv
bGljeZSTlCmBlH2UKIwLcGFyYW1fZHR5cGWUjAlqYXgubnVtcHmUjAdmbG9hdDMylJOUjA1jb21wdXRlX2R0eXBllGhK
jAdmbG9hdDE2lJOUjAxvdXRwdXRfZHR5cGWUaEx1YnUu
"""


def test_every_migration_of_the_page_is_run():
    titles = {row.title[0].upper() + row.title[1:] for row in migrations.MIGRATIONS}
    assert titles == migrations.LINES.keys()


# Orbax waits for the disk; what it was given it gives back, so one of each structure is enough.
BY_ORBAX = {
    "float32 to a dynamic scale",
    "masters and a dynamic scale to float32",
    "split masters to masters",
    "hysteresis scale to static",
    "Flax's `DynamicScale` to a dynamic scale",
    "Flax's `TrainState` to ours",
    "our `TrainState` to Flax's",
}


@pytest.mark.parametrize(
    ("row", "way"),
    in_full(
        {
            f"{row.name}, {way}": (row, way)
            for row in migrations.MIGRATIONS
            for way in migrations.WAYS
            if way != "Orbax" or row.name in BY_ORBAX
        },
        one_of=12,
    ),
)
def test_a_migrated_training_is_what_the_page_says(row, way):
    found = migrations.compared(row, way)
    assert [what for what, is_equal in found.items() if not is_equal] == []


def printed(heading, *names):
    """Returns names of the program of the page under a heading, which is run as it is printed."""
    part = migrations.PAGE.read_text().partition(f"## {heading}\n")[2]
    program = part.partition("```python\n")[2].partition("```")[0]
    known = {"__name__": "page"}
    exec(compile(program, heading, "exec"), known)
    return [known[name] for name in names]


def test_what_deepminds_jmp_pickled_is_read_by_the_printed_unpickler():
    unpickler, anew = printed("What DeepMind's jmp pickled", "DeepMindUnpickler", "anew")
    pickled = base64.b64decode(DEEPMINDS)
    with pytest.raises(ModuleNotFoundError, match="jmp._src"):
        pickle.loads(pickled)
    found = anew(unpickler(io.BytesIO(pickled)).load())
    assert found["params"]["w"].tolist() == [0.0, 1.0, 2.0]
    assert found["static"] == jmp.StaticLossScale(512)
    assert found["none"] == jmp.NoOpLossScale()
    assert found["policy"] == jmp.get_policy("p=f32,c=f16,o=f32")
    expected = jmp.DynamicLossScale(2.0**14, 2, 3, 2, 1.0)
    assert jax.tree.structure(found["loss_scale"]) == jax.tree.structure(expected)
    adjusted = jax.jit(lambda scale: scale.adjust(True))(found["loss_scale"])
    assert bits(adjusted) == bits(expected.adjust(True))


def restored(scale, saved):
    return serialization.from_state_dict(scale, saved)


NO_SCALES = [("loss_scale", number) for number in (np.nan, np.inf, 0.0, -4.0)]


@pytest.mark.parametrize(("name", "value"), [*NO_SCALES, ("counter", -1), ("tolerance", -2)])
def test_a_scale_that_is_none_is_not_restored(name, value):
    scale = jmp.HysteresisLossScale(8.0)
    saved = serialization.to_state_dict(scale)
    saved[name] = np.asarray(value, saved[name].dtype)
    words = f"holds a HysteresisLossScale .*{name} got .*{value:g}.*Restore an earlier checkpoint"
    with pytest.raises(ValueError, match=words):
        restored(scale, saved)


def test_a_scale_beyond_its_bounds_is_brought_back_to_them():
    for saved, expected in ((2.0**30, 2.0**20), (2.0**-3, 2.0), (2.0**7, 2.0**7)):
        state = {"loss_scale": np.float32(saved), "counter": np.int32(5)}
        found = restored(DYNAMIC, state)
        assert (float(found.loss_scale), int(found.counter)) == (expected, 5)


def test_many_scales_are_restored_and_as_many_are_expected():
    scales = jax.vmap(jmp.DynamicLossScale)(jnp.array([2.0, 4.0]), jnp.zeros(2, jnp.int32))
    saved = serialization.to_state_dict(scales)
    assert restored(scales, saved).loss_scale.tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match=r"loss_scale=float32\[2\] .*; expected float32\[\]"):
        restored(DYNAMIC, saved)
    saved["loss_scale"] = np.float32([2.0, np.nan])
    with pytest.raises(ValueError, match="cannot be used"):
        restored(scales, saved)
    with pytest.raises(ValueError, match="cannot be used"):
        restored(DYNAMIC, {"loss_scale": float("nan"), "counter": 0})


@pytest.mark.parametrize("placeholder", ["x", jax.ShapeDtypeStruct((), jnp.float32)])
def test_shardings_and_other_placeholders_are_restored_as_they_are(placeholder):
    tree = jax.tree.map(lambda _: placeholder, jmp.HysteresisLossScale(8.0))
    found = restored(tree, serialization.to_state_dict(tree))
    assert jax.tree.leaves(found) == [placeholder] * 3


def test_a_scale_of_another_class_is_refused_with_the_way_to_change_it():
    for scale in (jmp.HysteresisLossScale(8.0), jmp.StaticLossScale(8), jmp.NoOpLossScale()):
        with pytest.raises(ValueError, match=f"for a {type(scale).__name__}; expected") as refused:
            restored(scale, serialization.to_state_dict(DYNAMIC))
        assert "set_loss_scale(opt_state, new_scale)" in str(refused.value)


def in_state(tx, cls=linen.TrainState, params=PARAMS):
    return cls.create(apply_fn=None, params=params, tx=tx)


class WithKey(linen.TrainState):
    """What users derive."""

    key: jax.Array | None = None


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        (ADAM, SCALED),
        (SCALED, ADAM),
        (SCALED, transforms.with_loss_scale(ADAM, jmp.HysteresisLossScale(8.0))),
        (ADAM, transforms.with_master_params(ADAM)),
    ],
    ids=["no scale", "a scale", "another scale", "no masters"],
)
@pytest.mark.parametrize("cls", [linen.TrainState, WithKey])
def test_a_state_of_another_optimizer_is_refused_with_the_way_to_change_it(saved, fresh, cls):
    params = {"w": jnp.ones(4, jnp.float16)}
    content = serialization.to_bytes(in_state(saved, cls, params))
    with pytest.raises(
        ValueError, match=f"another optimizer, than this {cls.__name__} "
    ) as refused:
        serialization.from_bytes(in_state(fresh, cls, params), content)
    message = str(refused.value)
    for way in ("and the optimizer that saved it", "set_loss_scale", "reset"):
        assert way in message
    assert len(message) < 1500


def test_a_value_that_is_refused_is_not_taken_for_another_optimizer():
    state = in_state(SCALED)
    saved = serialization.to_state_dict(state)
    saved["opt_state"]["loss_scale"]["loss_scale"] = np.float32(np.nan)
    with pytest.raises(ValueError, match="^A checkpoint holds a DynamicLossScale that cannot"):
        restored(state, saved)


def test_fields_that_flaxs_train_state_lacks_are_named():
    theirs = in_state(ADAM, train_state.TrainState)
    ours = in_state(ADAM).replace(batch_stats={"mean": jnp.ones(2)})
    with pytest.raises(
        ValueError, match=r"only the second has \['batch_stats'\].*docs/checkpoints.md"
    ):
        serialization.from_bytes(ours, serialization.to_bytes(theirs))


def test_a_subclass_of_ours_saves_and_restores_its_own_fields():
    state = in_state(ADAM, WithKey).replace(key=jnp.uint32([1, 2]))
    found = serialization.from_bytes(in_state(ADAM, WithKey), serialization.to_bytes(state))
    assert found.key.tolist() == [1, 2]
