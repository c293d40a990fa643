"""`python -m moe_spac.executor.gpu_check`: every check that needs a GPU, in under eight minutes, into one JSON.

`--device cpu` runs the same checks on the emulated device. Exit 0 if all is well, 1 if a check failed, 2 without a GPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..traces.console import run_main, starting
from ..traces.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them all and write what they found. Raises InputError without a GPU that torch can use."""
    parser = argparse.ArgumentParser(prog="python -m moe_spac.executor.gpu_check", description=__doc__)
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="Where to write the JSON; else to stdout.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the emulated device.")
    given = parser.parse_args(arguments)
    with starting():
        from .all_checks import CHECKS, check_all
        from .device import has_gpu
    if given.device == "cuda" and not has_gpu():
        raise InputError("no GPU that torch can use; --device cpu runs the checks on the emulated device")
    found = check_all(given.device, CHECKS, sys.stderr.write)
    text = json.dumps(found, indent=1) + "\n"
    if given.out is None:
        sys.stdout.write(text)
    else:
        given.out.write_text(text)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    run_main(main)
