"""Between a GPU's memory and the host's, beside the passes."""

from __future__ import annotations

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host; one of a GPU goes into pinned memory on a stream of its own.

    Called beside the engine's thread: passes that are queued later do not wait for it.
    """
    if tensor.device.type != "cuda":
        return tensor
    stream = _streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
    stream.wait_stream(torch.cuda.current_stream(tensor.device))  # what makes the tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    stream.synchronize()
    return host


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device; to a GPU from pinned memory, without waiting."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
