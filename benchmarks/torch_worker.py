"""PyTorch's automatic mixed precision as a worker: `torch.autocast` and `torch.amp.GradScaler`.

    python -m benchmarks.torch_worker eager|compile

Its usual best: fused optimizers, convolutions in channels-last, attention by
`functional.scaled_dot_product_attention`, for which PyTorch chooses the kernel. Obeys the commands
of `benchmarks.worker` that time.
"""

import sys
import time
from typing import Any

import torch
from torch.nn import functional

from benchmarks import torch_models
from benchmarks.worker import obey
from benchmarks.workloads import Workload, find

MODELS = {
    "gpt2": (torch_models.GPT2, {}),
    "resnet50-cifar-128": (torch_models.resnet, {}),
    "resnet50-cifar-512": (torch_models.resnet, {}),
    "resnet50-imagenet": (torch_models.resnet, {"classes": 1000, "small_images": False}),
    "vit-b16": (torch_models.ViT, {}),
}
TINY = {
    torch_models.GPT2: {"layers": 1, "width": 32, "heads": 2, "vocabulary": 64, "length": 16},
    torch_models.resnet: {"stages": (1, 1), "width": 8, "classes": 10},
    torch_models.ViT: {
        "layers": 1, "width": 32, "heads": 2, "patch": 8, "classes": 10, "size": 16,
    },
}  # fmt: skip


class TorchWorker:
    """Every public method is a command; it returns what is answered."""

    def __init__(self, compiled: bool) -> None:
        self._compiled = compiled
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        # No CPU trains in float16; a rehearsal there takes bfloat16.
        self._half = torch.float16 if self._device == "cuda" else torch.bfloat16

    def prepare(self, workload: str, rehearse: bool) -> dict[str, Any]:
        """Makes model, optimizer and batch and takes the first steps, which compile."""
        make, sizes = MODELS[workload]
        found = find(workload, rehearse)
        images = found.inputs.ndim == 4
        model = make(**(TINY[make] if rehearse else sizes)).to(self._device)
        if images:
            model = model.to(memory_format=torch.channels_last)
        self._optimizer = self._make_optimizer(model, adam=workload in ("gpt2", "vit-b16"))
        self._model = torch.compile(model) if self._compiled else model
        self._scaler = torch.amp.GradScaler(self._device)
        self._inputs, self._targets = self._batch(found, images)
        started = time.perf_counter()
        self.time(3)
        return {
            "compile_seconds": time.perf_counter() - started,
            "step_seconds": self.time(3)["seconds"] / 3,
        }

    def time(self, steps: int) -> dict[str, Any]:
        """Takes some steps and returns their seconds, waiting for the device once at the end."""
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._wait()
        return {"seconds": time.perf_counter() - started}

    def peak(self) -> dict[str, Any]:
        """Returns the most device memory that tensors held."""
        return {
            "peak_bytes": torch.cuda.max_memory_allocated() if self._device == "cuda" else None,
            "torch": torch.__version__,
        }

    def _step(self) -> None:
        with torch.autocast(self._device, dtype=self._half):
            logits = self._model(self._inputs)
            loss = functional.cross_entropy(logits.flatten(0, -2), self._targets.flatten())
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    def _make_optimizer(self, model: Any, adam: bool) -> Any:
        fused = self._device == "cuda"
        if adam:
            return torch.optim.AdamW(model.parameters(), 3e-4, fused=fused)
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, fused=fused)

    def _batch(self, workload: Workload, images: bool) -> tuple[Any, Any]:
        shape, classes = workload.inputs.shape, workload.classes
        if images:
            batch, height, width, channels = shape
            inputs = torch.randn(batch, channels, height, width, device=self._device)
            inputs = inputs.to(memory_format=torch.channels_last)
        else:
            inputs = torch.randint(classes, shape, device=self._device)
        return inputs, torch.randint(classes, workload.targets.shape, device=self._device)

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    obey(TorchWorker(compiled=sys.argv[1] == "compile"))
