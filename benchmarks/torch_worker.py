"""PyTorch's automatic mixed precision as a worker: `torch.autocast` and `torch.amp.GradScaler`.

    python -m benchmarks.torch_worker eager|compile

It trains GPT-2 with its usual best: a fused optimizer, and attention by
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
from benchmarks.workloads import find

TINY = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 64, "length": 16}


class TorchWorker:
    """Every public method is a command; it returns what is answered."""

    def __init__(self, compiled: bool) -> None:
        self._compiled = compiled
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        # No CPU trains in float16; a rehearsal there takes bfloat16.
        self._half = torch.float16 if self._device == "cuda" else torch.bfloat16

    def prepare(self, workload: str, rehearse: bool) -> dict[str, Any]:
        """Makes model, optimizer and batch and takes the first steps, which compile."""
        found = find(workload, rehearse)
        model = torch_models.GPT2(**(TINY if rehearse else {})).to(self._device)
        fused = self._device == "cuda"
        self._optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=fused)
        self._model = torch.compile(model) if self._compiled else model
        self._scaler = torch.amp.GradScaler(self._device)
        self._inputs, self._targets = (
            torch.randint(found.classes, array.shape, device=self._device)
            for array in (found.inputs, found.targets)
        )
        self.time(3)  # the first one compiles
        return {"step_seconds": self.time(3)["seconds"] / 3}

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

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    obey(TorchWorker(compiled=sys.argv[1] == "compile"))
