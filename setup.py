"""The compiled expert kernels: optional, torch computes where they cannot be built (`executor/kernels.py`)."""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("executor/csrc")

setup(
    ext_modules=[
        Extension(
            "moe_spac.executor._kernels",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            # No fast-math and no fused steps but those written down: results are the same on every instruction set.
            extra_compile_args=["-O3", "-ffp-contract=off", "-std=gnu11", "-pthread"],
            extra_link_args=["-pthread", "-lm"],
            optional=True,
        )
    ]
)
