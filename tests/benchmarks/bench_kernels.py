"""Microseconds per expert of Qwen3-30B-A3B, as a share of the read speed measured next to them, and against torch.

Each pass goes over more experts than caches hold. A pass of reading with the same threads comes before and after each
pass of the kernels; the share is the median over such pairs, since the speed of a shared machine drifts. Reading
is torch's sum of the same bytes as 64-bit numbers. `of best` is the quickest pass against the quickest reading: other
processes slow the reading more than the kernels, whose threads work in small pieces, and so raise the other share.
"""

import argparse
import json
import statistics
from time import perf_counter, process_time

import torch
import torch.nn.functional as F

from moe_spac.executor import kernels
from moe_spac.executor.formats import EXACT, QUANTISED, Format
from moe_spac.executor.pages import roomy
from moe_spac.executor.store import Record

HIDDEN, WIDTH = 2048, 768
AT_ONCE = 8  # experts in a call, as a layer of the model has
FORMATS = {"f32": EXACT["float32"], "bf16": EXACT["bfloat16"], "f16": EXACT["float16"], **QUANTISED}
AIMS = {"bf16": 75, "q8": 75, "q4": 60}  # per cent at one token with two threads


def experts_of(fmt: Format, megabytes: int) -> tuple[Record, torch.Tensor]:
    """Random experts [E, bytes] with scales near a real model's."""
    record = Record(HIDDEN, WIDTH, fmt, torch.float32)
    count = max(2, megabytes * 10**6 // record.size // AT_ONCE) * AT_ONCE
    slab = roomy(count, record.size)
    random = torch.Generator().manual_seed(0)
    for part, columns in ((record.up, HIDDEN), (record.down, WIDTH)):
        rows = part(slab[0]).shape[0]
        part(slab[0]).copy_(fmt.encode(torch.randn(rows, columns, generator=random) * 0.02))
    slab[1:] = slab[:1]
    return record, slab


def read(slab: torch.Tensor) -> None:
    """Every byte once."""
    slab.view(torch.int64).sum()


def run_kernels(record: Record, slab: torch.Tensor, x: torch.Tensor, threads: int) -> None:
    m = len(x)
    middle, out = torch.empty(AT_ONCE * m, 2 * WIDTH), torch.empty(AT_ONCE * m, HIDDEN)
    sources, targets = list(range(m)) * AT_ONCE, list(range(AT_ONCE * m))
    stages, start = kernels.UP | kernels.GATE | kernels.DOWN, slab.data_ptr()
    for first in range(0, len(slab), AT_ONCE):
        addresses = [start + (first + i) * record.size for i in range(AT_ONCE)]
        kernels.run(record.matrices, stages, addresses, [m] * AT_ONCE, sources, targets, x, middle, out, threads)


def run_torch(record: Record, slab: torch.Tensor, x: torch.Tensor) -> None:
    for flat in slab:
        up, down = record.weights(flat)[:2]
        gate, value = F.linear(x, up).chunk(2, -1)
        F.linear(F.silu(gate) * value, down)


def seconds(work, *args, clock=perf_counter) -> float:
    begin = clock()
    work(*args)
    return clock() - begin


def measure(name: str, threads: int, tokens: int, options: argparse.Namespace) -> dict[str, float | int | str]:
    record, slab = experts_of(FORMATS[name], options.megabytes)
    x, clock = torch.randn(tokens, HIDDEN), process_time if options.cpu_time else perf_counter
    torch.set_num_threads(threads)
    run_kernels(record, slab[:AT_ONCE], x, threads)
    times, shares, readings = [], [], []
    before = seconds(read, slab, clock=clock)
    for _ in range(options.repeats):
        ours = seconds(run_kernels, record, slab, x, threads, clock=clock)
        after = seconds(read, slab, clock=clock)
        reading, before = (before + after) / 2, after
        times.append(ours / len(slab) * 1e6)
        shares.append(100 * reading / ours)
        readings.append(after)
    row = {"format": name, "threads": threads, "tokens": tokens, "us": statistics.median(times), "us_best": min(times)}
    row |= {"read_GB_s": slab.numel() / statistics.median(readings) / 1e9, "percent_of_read": statistics.median(shares)}
    return row | {"percent_of_best": 100 * min(readings) / (min(times) * len(slab) / 1e6)}


def against_torch(name: str, threads: int, tokens: int, options: argparse.Namespace) -> float:
    """Time of torch's float32 products over the time of the kernels, for the same experts; median of pairs."""
    clock = process_time if options.cpu_time else perf_counter
    theirs, ours = experts_of(FORMATS["f32"], options.megabytes), experts_of(FORMATS[name], options.megabytes)
    x = torch.randn(tokens, HIDDEN)
    torch.set_num_threads(threads)
    ratios = []
    with torch.inference_mode():
        for _ in range(options.repeats):
            slow = seconds(run_torch, *theirs, x, clock=clock) / len(theirs[1])
            ratios.append(slow / (seconds(run_kernels, *ours, x, threads, clock=clock) / len(ours[1])))
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", default="1,4,8")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=300, help="of experts to go over")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, for a busy machine: with 1 thread only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.cpu_time and options.threads != "1":
        parser.error("--cpu-time takes --threads 1: with more, a thread that sleeps costs nothing")
    if not kernels.ready():
        parser.error(f"no compiled kernels: {kernels.describe()['why']}")
    rows = []
    if not options.json:
        print(kernels.describe())  # noqa: T201
        print("format threads tokens  us/expert  (best)  read GB/s  % of it  of best   aim")  # noqa: T201
    for name in options.formats.split(","):
        for threads in map(int, options.threads.split(",")):
            for tokens in map(int, options.tokens.split(",")):
                row = measure(name, threads, tokens, options)
                if tokens == 8:
                    row["torch_f32_over_ours"] = against_torch(name, threads, tokens, options)
                rows.append(row)
                if not options.json:
                    show(row)
    if options.json:
        print(json.dumps(rows, indent=1))  # noqa: T201


def show(row: dict) -> None:
    aim = AIMS.get(row["format"]) if row["tokens"] == 1 and row["threads"] == 2 else None
    more = f"{aim:5d}" if aim else ""
    if "torch_f32_over_ours" in row:
        more = f"      torch f32 takes {row['torch_f32_over_ours']:.2f}x"
    print(  # noqa: T201
        f"{row['format']:6s} {row['threads']:7d} {row['tokens']:6d} {row['us']:10.0f} {row['us_best']:8.0f} "
        f"{row['read_GB_s']:10.1f} {row['percent_of_read']:8.0f} {row['percent_of_best']:8.0f} {more}",
        flush=True,
    )


if __name__ == "__main__":
    main()
