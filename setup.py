"""The compiled parts, each optional: expert kernels, where they cannot be built torch computes (`executor/kernels.py`);
and the arithmetic of the policy `marginal`, where numpy does (`policies/csrc/marginal.h`)."""

from pathlib import Path

from setuptools import Extension, setup

# No fast-math and no fused steps but those written down: results are the same on every instruction set.
FLAGS = ["-O3", "-ffp-contract=off", "-std=gnu11"]


def extension(name: str, folder: Path, compile_args: list[str], link_args: list[str]) -> Extension:
    return Extension(
        name,
        sources=sorted(str(path) for path in folder.glob("*.c")),
        depends=sorted(str(path) for path in folder.glob("*.h")),
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        optional=True,
    )


setup(
    ext_modules=[
        extension("moe_spac.executor._kernels", Path("executor/csrc"), [*FLAGS, "-pthread"], ["-pthread", "-lm"]),
        extension("moe_spac.policies._marginal", Path("policies/csrc"), FLAGS, []),
    ]
)
