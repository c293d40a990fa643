"""Host memory in pages of 2 MiB, where the system has them to give.

Weights are read from end to end for every token, and processors stop reading ahead at the end of a page.
"""

import mmap

import torch

LARGE = 2 * 2**20  # bytes; less than this is never in such a page


def roomy(*shape: int) -> torch.Tensor:
    """Bytes of a shape, not yet anything: in large pages if that is possible, else ordinary memory.

    MemoryError or RuntimeError, as torch.empty: there is no such room.
    """
    size = torch.Size(shape).numel()
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=torch.uint8)
    try:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # no such pages, or no room, of which torch tells in its own words
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(room, dtype=torch.uint8).view(shape)


def moved(raw: torch.Tensor) -> torch.Tensor:
    """A copy of bytes, in such memory."""
    return roomy(*raw.shape).copy_(raw)
