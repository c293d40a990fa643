"""Routing traces: what they are, how they are recorded, read, imported and described."""

from typing import TYPE_CHECKING, Any

from .schema import Header, Kind, ModelShape, Step

if TYPE_CHECKING:
    from .reader import open_trace
    from .writer import TraceWriter

__all__ = ["Header", "Kind", "ModelShape", "Step", "TraceWriter", "open_trace"]


def __getattr__(name: str) -> Any:
    """The file format needs pyarrow, which whoever asks only for the schema need not wait for."""
    if name == "open_trace":
        from .reader import open_trace

        return open_trace
    if name == "TraceWriter":
        from .writer import TraceWriter

        return TraceWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
