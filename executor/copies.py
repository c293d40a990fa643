"""What a copy to a GPU costs by its size, from page-locked and from pageable memory. Not run: there was no GPU."""

from collections.abc import Sequence
from statistics import median

import numpy as np
import torch

from ..simulator.machine import Quantity
from .device import Device, Pins, device_of, gpu_memory
from .probe import Subject

SIZES = tuple(2**n for n in range(16, 27, 2))  # 64 KiB to 64 MiB
COPIES = 9  # of each size; their median counts


def copy_times(
    device: Device, pinned: bool, sizes: Sequence[int] = SIZES, copies: int = COPIES
) -> list[tuple[int, int]]:
    """(bytes, ns) of a copy alone, the median of several, through the device's own link."""
    host = torch.zeros(max(sizes), dtype=torch.uint8)
    target = device.allocate(max(sizes), "expert slots")
    pins = Pins()
    if pinned:
        device.pin(host, pins)
        sizes = [size for size in sizes if size <= pins.size]
    points = []
    for size in sizes:
        taken = []
        for _ in range(COPIES):
            ticket = device.send(target[:size], host[:size], pins, None, 0, 0)
            device.landed(ticket)
            taken.append(device.elapsed(ticket.begin, ticket.end))
        points.append((size, round(median(taken))))
    device.unpin(pins)
    return points


def fit_copies(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """ns of a copy beyond its bytes, and bytes/s, by least squares of the relative errors."""
    sizes, taken = (np.array(column, float) for column in zip(*points, strict=True))
    slope, fixed = np.polyfit(sizes, taken, 1, w=1 / taken)
    if fixed < 0 or slope <= 0:  # too noisy to be told apart
        return 0.0, float((sizes / taken).max() * 1e9)
    return float(fixed), float(1e9 / slope)


def measure_copies(subject: Subject) -> dict[str, Quantity]:
    """The link's entries of a profile for a CUDA device, and its memory."""
    device = device_of(subject.device)
    entries = {}
    for pinned, names in ((True, ("copy_fixed", "bandwidth")), (False, ("pageable_fixed", "pageable_bandwidth"))):
        points = copy_times(device, pinned)
        if not points:
            continue  # nothing can be page-locked here
        what = f"{'pinned' if pinned else 'pageable'} copies of {points[0][0]} to {points[-1][0]} bytes"
        for name, value in zip(names, fit_copies(points), strict=True):
            entries[f"link.{name}"] = Quantity(value, "measured", what)
    entries["gpu.vram"] = Quantity(gpu_memory(subject.device)[1], "measured", "the driver")
    return entries
