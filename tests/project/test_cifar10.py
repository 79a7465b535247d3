"""The CIFAR-10 example, end to end on small files in the standard format."""

import json
import os
import pickle

import jax
import numpy as np
import pytest
from flax import serialization

from testbed.example_data import FILES, write_images
from tests.project.running import completed, imported_example, refusal

pytestmark = pytest.mark.full

TINY = ["--model=resnet18", "--width=4", "--batch-size=8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "cifar-10-batches-py")


def train(data, output, *arguments):
    """Returns what the example printed, and its report if it wrote one."""
    options = [f"--data-dir={data}", f"--output-dir={output}", *TINY, *arguments]
    printed, report = completed("cifar10", *options), output / "cifar10.json"
    return printed, json.loads(report.read_text()) if report.exists() else None


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("uninterrupted")
    return output, *train(data, output, "--epochs=2")


def test_it_writes_its_table_its_numbers_its_models_and_its_picture(uninterrupted):
    output, printed, report = uninterrupted
    assert "Training on cpu" in printed
    assert report["device"] == "cpu" and report["options"]["width"] == 4
    assert (report["train_images"], report["test_images"]) == (80, 16)
    assert "</svg>" in (output / "cifar10.svg").read_text()
    assert [run["precision"] for run in report["runs"]] == ["float32", "float16"]
    for run in report["runs"]:
        assert run["precision"] in printed and run["skipped_steps"] < 20
        history = run["epochs"]
        assert len(history["loss"]) == len(history["test_accuracy"]) == len(history["seconds"]) == 2
        assert history["compiled_in"] == [0]
        assert run["seconds_per_epoch"] == history["seconds"][1]
        # The stored model is what the training's own products see: it tells the images alike.
        assert run["test_accuracy"] == history["test_accuracy"][-1]


def test_the_exported_model_is_half_but_for_its_norms_and_the_checkpoint_float32(uninterrupted):
    output, _, report = uninterrupted
    full, half = report["runs"]
    assert full["parameter_bytes"] == half["parameter_bytes"]
    folder = output / "checkpoints" / "cifar10" / "float16-batch8"
    model = serialization.msgpack_restore((folder / "model.msgpack").read_bytes())
    dtypes = {
        (path[0].key, "BatchNorm" in path[-2].key): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    assert dtypes == {
        ("params", False): "float16",
        ("params", True): "float32",
        ("batch_stats", True): "float32",
    }
    assert half["model_bytes"] == (folder / "model.msgpack").stat().st_size
    assert 0.5 < half["model_bytes"] / full["model_bytes"] < 0.6
    # Parameters and momentum in float32, compressed.
    assert half["checkpoint_bytes"] > 1.5 * half["parameter_bytes"]
    assert [path.name for path in (folder / "training").iterdir() if path.is_dir()] == ["2"]


def test_a_resumed_training_ends_bit_for_bit_where_an_uninterrupted_one_ends(
    data, uninterrupted, tmp_path
):
    options = ("--epochs=2", "--precision=float16")
    printed, report = train(data, tmp_path, *options, "--stop-after=1")
    assert "Stopped after epoch 1 of 2" in printed and report is None
    _, report = train(data, tmp_path, *options, "--resume")
    output, _, expected = uninterrupted
    (run,), expected_run = report["runs"], expected["runs"][1]
    for name in ("loss", "test_accuracy"):
        assert run["epochs"][name] == expected_run["epochs"][name]
    assert run["epochs"]["compiled_in"] == [0, 1]
    model = "checkpoints/cifar10/float16-batch8/model.msgpack"
    assert (tmp_path / model).read_bytes() == (output / model).read_bytes()


def test_missing_data_is_named_with_the_way_to_get_it(data, tmp_path):
    for name in FILES[1:]:
        (tmp_path / name).write_bytes((data / name).read_bytes())
    lacking = f"{tmp_path} lacks ['data_batch_1']"
    for given, came in (([], "--data-dir is missing"), ([f"--data-dir={tmp_path}"], lacking)):
        error = refusal("cifar10", *given)
        assert came in error and all(name in error for name in FILES)
        assert "https://www.cs.toronto.edu/~kriz/cifar.html" in error
        assert "nothing is downloaded" in error


def test_a_batch_has_at_most_all_images(data):
    given = (f"--data-dir={data}", *TINY)
    assert "at most 80, the images to train on" in refusal("cifar10", *given, "--batch-size=96")


@pytest.fixture
def load_data():
    """The example's loader, in this process."""
    with imported_example("_cifar10_files") as module:
        yield module.load_data


def images(count, labels=None):
    content = {b"data": np.zeros((count, 3072), np.uint8), b"labels": labels}
    return pickle.dumps({k: v for k, v in content.items() if v is not None}, protocol=4)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize(
    ("content", "came"),
    [
        (b"<html>404</html>", "cannot be read (UnpicklingError"),
        (images(2), "cannot be read (KeyError"),
        (
            images(2, [0]),
            "holds data uint8[2, 3072] and labels [1]; expected uint8[n, 3072] and n labels",
        ),
        (images(1, [10]), "n labels from 0 to 9"),
        (pickle.dumps(Attack()), "which could run code"),
    ],
)
def test_a_file_of_other_contents_is_refused_by_its_name_and_runs_nothing(
    load_data, tmp_path, monkeypatch, content, came
):
    monkeypatch.chdir(tmp_path)
    folder = write_images(tmp_path / "data", images=2)
    (folder / "data_batch_3").write_bytes(content)
    with pytest.raises(ValueError) as refused:
        load_data(folder)
    message = str(refused.value)
    assert str(folder / "data_batch_3") in message and came in message
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in message
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("protocol", ["python 2", 4])
def test_images_and_labels_come_as_they_were_written(load_data, tmp_path, protocol):
    folder = write_images(tmp_path / "cifar-10-batches-py", images=2)
    image = np.arange(32 * 32 * 3).reshape(32, 32, 3).astype(np.uint8)
    planes = np.concatenate([image[..., color].ravel() for color in range(3)])
    if protocol != "python 2":
        content = {b"data": np.stack([planes, planes]), b"labels": [3, 9]}
        (folder / "test_batch").write_bytes(pickle.dumps(content, protocol))
    for given in (folder, tmp_path):  # the folder itself, and the one around it
        loaded, classes = load_data(given)
        assert classes == 10
        assert loaded["train_images"].shape == (10, 32, 32, 3)
        assert loaded["train_labels"].dtype == np.int32
        mean = loaded["train_images"].reshape(-1, 3).astype(float).mean(axis=0)
        np.testing.assert_allclose(loaded["mean"], mean, rtol=1e-6)
        if protocol != "python 2":
            np.testing.assert_array_equal(loaded["test_images"], np.stack([image, image]))
            assert loaded["test_labels"].tolist() == [3, 9]
