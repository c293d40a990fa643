"""The shape of the model behind routing that somebody else recorded, from what the user says of it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import InputError
from .reader import BUNDLED, open_trace
from .schema import ModelShape

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8": 8, "int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class ShapeFlags:
    """What `spac-trace import` was told. `model` is a trace (its header has the shape), a model that `synth` knows, a
    config.json, a folder with one, or a Hugging Face name; the rest replaces its values, or takes its place where there
    is no `model`. Sizes in bytes.
    """

    model: str | None = None
    experts: int | None = None
    top_k: int | None = None
    layers: int | None = None
    hidden: int | None = None
    expert_width: int | None = None
    dtype: str | None = None
    expert_bytes: int | None = None
    dense_bytes: int | None = None
    kv_bytes: int | None = None


def named_shape(flags: ShapeFlags) -> ModelShape | None:
    """Shape of the model that `--model` names, with what other flags replace; None where none is named."""
    if flags.model is None:
        return None
    replaced = {
        "experts": flags.experts,
        "top_k": flags.top_k,
        "layers": flags.layers,
        "hidden": flags.hidden,
        "expert_width": flags.expert_width,
        "dtype": flags.dtype,
        "expert_bytes": flags.expert_bytes,
        "dense_bytes": flags.dense_bytes,
        "kv_bytes_per_token": flags.kv_bytes,
    }
    return replace(_named(flags), **{name: value for name, value in replaced.items() if value is not None})


def shape_of(
    named: ModelShape | None, flags: ShapeFlags, moe_layers: tuple[int, ...] | int, top_k: int, src: str
) -> ModelShape:
    """The model whose routing has `top_k` experts in `moe_layers` (absolute numbers, or only how many).

    Nothing that a simulation rests on is guessed: InputError lists every flag that is missing, or says where the
    routing does not fit the model that was named.
    """
    if named is not None:
        return _fitted(named, moe_layers, top_k, src)
    if flags.top_k not in (None, top_k):
        raise InputError(f"{src}: the routing has {top_k} experts a token, not the {flags.top_k} of --top-k")
    needed = ("experts", "hidden", "expert_width", "dense_bytes", "kv_bytes")
    missing = [flag for flag in needed if getattr(flags, flag) is None]
    if missing:
        listed = ", ".join("--" + flag.replace("_bytes", "_size").replace("_", "-") for flag in missing)
        raise InputError(
            f"{src}: the file does not say which model was routed; give --model (a trace, a config.json or a Hugging "
            f"Face name), or {listed}"
        )
    assert flags.experts
    assert flags.hidden
    assert flags.expert_width
    dtype = flags.dtype or "bfloat16"
    if dtype not in BITS and flags.expert_bytes is None:
        raise InputError(f"--dtype {dtype}: its size is not known; choose {', '.join(BITS)}, or give --expert-size")
    numbers = tuple(range(moe_layers)) if isinstance(moe_layers, int) else moe_layers
    weights = 3 * flags.hidden * flags.expert_width
    return ModelShape(
        name=Path(src).stem,
        layers=max(flags.layers or 0, numbers[-1] + 1),
        moe_layers=numbers,
        experts=flags.experts,
        top_k=top_k,
        hidden=flags.hidden,
        expert_width=flags.expert_width,
        dtype=dtype,
        expert_bytes=flags.expert_bytes or weights * BITS[dtype] // 8,
        dense_bytes=flags.dense_bytes or 0,
        kv_bytes_per_token=flags.kv_bytes or 0,
    )


def _named(flags: ShapeFlags) -> ModelShape:
    name = str(flags.model)
    path = Path(name).expanduser()
    if name in BUNDLED or path.suffix == ".spac":
        return open_trace(name).header.target
    from .synth import model_shape, models

    if name in models():
        return model_shape(name, flags.dtype)
    place = path.parent if path.name == "config.json" else path
    if path.suffix == ".json" and path.name != "config.json":
        place = path
    if not place.exists() and (path.is_absolute() or name.startswith(".") or path.suffix == ".json"):
        raise InputError(f"--model {name}: no such file or folder; give a trace, a config.json or a Hugging Face name")
    return _of_config(name, str(place) if place.exists() else name, flags.dtype)


def _of_config(name: str, place: str, dtype: str | None) -> ModelShape:
    from transformers import AutoConfig

    from .models import dtype_of, model_shape, quiet

    try:
        with quiet():
            config: Any = AutoConfig.from_pretrained(place)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"--model {name}: its configuration cannot be read ({first}); give a saved config.json, or the sizes by "
            "flags (--experts, --hidden, ...)"
        ) from None
    torch_dtype = dtype if dtype in ("float32", "bfloat16", "float16") else "auto"
    try:
        shape = model_shape(config, name, dtype_of(config, torch_dtype))
    except InputError as error:
        raise InputError(str(error).replace("--target", "--model", 1)) from None
    if dtype is None or dtype == shape.dtype:
        return shape
    if dtype not in BITS:
        return replace(shape, dtype=dtype)
    bits = BITS[shape.dtype]
    return replace(shape, dtype=dtype, expert_bytes=shape.expert_bytes * BITS[dtype] // bits)


def _fitted(shape: ModelShape, moe_layers: tuple[int, ...] | int, top_k: int, src: str) -> ModelShape:
    count = moe_layers if isinstance(moe_layers, int) else len(moe_layers)
    if count != len(shape.moe_layers):
        raise InputError(
            f"{src}: the routing has {count} layers, but the model has {len(shape.moe_layers)} with experts; name the "
            "model that was recorded with --model"
        )
    numbered = moe_layers if isinstance(moe_layers, tuple) else tuple(range(count))
    if numbered not in (shape.moe_layers, tuple(range(count))):
        raise InputError(
            f"{src}: the routing is of layers {_short(numbered)}, but the model's layers with experts are "
            f"{_short(shape.moe_layers)}; name the model that was recorded with --model"
        )
    if top_k != shape.top_k:
        raise InputError(
            f"{src}: the routing has {top_k} experts a token, but the model chooses {shape.top_k}; name the model "
            "that was recorded with --model, or give --top-k"
        )
    return shape


def _short(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 4 else f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
