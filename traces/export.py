"""Traces as Parquet, for tools that read nothing else."""

from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .errors import InputError
from .layout import schema_of, to_batch
from .reader import Trace

BATCHES_A_GROUP = 64


def export_parquet(trace: Trace, out: str | Path) -> int:
    """Write all rows, in the columns of the trace and with its header in the metadata; returns how many rows."""
    schema = schema_of(trace.header)
    total = 0
    try:
        with pq.ParquetWriter(str(out), schema, compression="zstd") as writer:
            batches = trace.batches()
            while group := list(islice(batches, BATCHES_A_GROUP)):
                table = pa.Table.from_batches([to_batch(rows, schema) for rows in group])
                writer.write_table(table, row_group_size=len(table))
                total += len(table)
    except OSError as error:
        raise InputError(f"{out}: cannot write: {error.strerror or error}") from error
    return total
