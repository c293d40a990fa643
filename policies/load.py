"""From what a user types to a policy object, and from a policy object to a file."""

import difflib
import inspect
import sys
import tomllib
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..traces.errors import InputError
from .clairvoyant import Min
from .dali import Dali
from .fiddler import Fiddler
from .freetoken import FreeToken
from .frequency import DecayedLfu, Lfru, Lfu, LfuInCache, Lrfu
from .gates import GateLookahead
from .governor import Governed
from .hybrimoe import HybriMoe, HybriMoeRelease
from .infinity import MoeInfinity, MoeInfinityRelease
from .interface import Policy
from .kt import KtDynamic, KtFrequency, KtFront, KtRandom, KtUniform
from .llamacpp import LlamacppCache, NCpuMoe
from .lookahead import Lookahead, OracleWindow
from .marginal import Marginal
from .placement import Hindsight
from .promoe import ProMoe
from .queues import S3Fifo, Slru
from .recency import ArLru, Fifo, LeastStale
from .spac import MoeSpac, MoeSpacRelease
from .speq import MoeSpeq
from .spmoe import SpMoe
from .static import Static

OWN: tuple[type[Policy], ...] = (
    *(NCpuMoe, Static, KtUniform, KtFront, KtRandom, KtFrequency, KtDynamic, Fiddler),
    *(ArLru, Fifo, Lfu, LfuInCache, Lfru, DecayedLfu, Lrfu, LeastStale, Slru, S3Fifo, LlamacppCache),
    *(HybriMoe, HybriMoeRelease, FreeToken, Dali, MoeSpac, MoeSpacRelease, Governed, Marginal),
    *(GateLookahead, MoeInfinity, MoeInfinityRelease, ProMoe, SpMoe, MoeSpeq),
    *(Hindsight, Lookahead, Min, OracleWindow),
)
GROUP = "moe_spac.policies"  # entry points by which other packages offer policies


def policy_names() -> dict[str, str]:
    """Every policy that can be named, with one line about it. Policies of other packages are not imported for this."""
    known = {cls.name: _first_line(cls) for cls in OWN}
    for name, point in _packaged().items():
        known.setdefault(name, f"from the package {point.dist.name if point.dist else point.value}")
    return known


def load_policy(spec: str, allow_lossy: bool = True) -> Policy:
    """The policy that `spec` names, not yet set up.

    "name" or "name:key=value,key=value"; "path/to/file.py:Class", with parameters likewise; or a policy file
    "winner.toml" as `save_policy` writes it. InputError says what is unknown and what there is; or, without
    `allow_lossy`, that the policy changes tokens.
    """
    if spec.endswith(".toml"):
        policy = read_policy_file(Path(spec))[0]
    else:
        head, parameters = _split(spec)
        policy = _construct(head, _find_class(head, Path()), _parse_parameters(spec, parameters))
    check_lossless(spec, policy, allow_lossy)
    return policy


def check_lossless(spec: str, policy: Policy, allow_lossy: bool) -> None:
    """InputError if the policy changes tokens and nobody has allowed that."""
    if not (policy.lossless or allow_lossy):
        raise InputError(f"--policy {spec}: this policy changes the model's output; run it with --allow-lossy")


def check_causal(spec: str, policy: Policy) -> None:
    """InputError if the policy needs the future, which no live run has."""
    if policy.clairvoyant:
        raise InputError(f"--policy {spec}: it has to know the future, so it cannot run live; use it in spac-sim")


def describe(spec: str) -> dict[str, Any]:
    """What is to be known about a policy: its parameters with type and default, its docstring, where its code is.

    `spec` names it as for `load_policy`; given parameters take the place of defaults. InputError as there.
    """
    policy = load_policy(spec)
    cls = type(policy)
    doc = inspect.getdoc(cls) if cls.__doc__ else ""
    return {
        "name": policy.name,
        "about": _first_line(cls),
        "parameters": [
            {"name": name, "value": getattr(policy, name), "type": _type_words(kind)}
            for name, kind in parameter_types(cls).items()
        ],
        "scope": policy.scope,
        "lossless": policy.lossless,
        "clairvoyant": policy.clairvoyant,
        "description": doc,
        "source": f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}",
    }


def read_policy_file(path: Path) -> tuple[Policy, dict[str, Any]]:
    """The policy in a policy file and how it was chosen. A policy's own .py file is looked for beside the file."""
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: no such policy file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: not a policy file: {error}") from None
    name, parameters, chosen = content.get("name"), content.get("parameters", {}), content.get("chosen", {})
    if not isinstance(name, str) or not isinstance(parameters, dict) or not isinstance(chosen, dict):
        raise InputError(f'{path}: a policy file has name = "..." and the tables [parameters] and [chosen]')
    return _construct(str(path), _find_class(name, path.parent), parameters), chosen


def save_policy(path: Path, policy: Policy, chosen: Mapping[str, Any]) -> None:
    """Write a policy file: its name, all its parameters, and how it was chosen (text, numbers and booleans)."""
    cls = type(policy)
    name = policy.name if cls in OWN or _is_packaged(cls) else _name_by_file(cls)
    values = {f.name: getattr(policy, f.name) for f in fields(policy) if f.init} if is_dataclass(policy) else {}
    lines = [f"name = {_toml(name)}", "", "[parameters]", *_toml_lines(values), "", "[chosen]", *_toml_lines(chosen)]
    path.write_text("\n".join(lines) + "\n")


def _is_packaged(cls: type[Policy]) -> bool:
    point = _packaged().get(cls.name)
    return point is not None and point.value.replace(" ", "").split("[")[0] == f"{cls.__module__}:{cls.__qualname__}"


def _name_by_file(cls: type[Policy]) -> str:
    try:
        return f"{Path(inspect.getfile(cls)).resolve()}:{cls.__name__}"
    except (TypeError, OSError):
        raise InputError(f"policy {cls.name}: put the class in a .py file, so that a policy file can name it") from None


def _split(spec: str) -> tuple[str, str]:
    """What is named, and the text of its parameters."""
    if ".py:" in spec:
        path, rest = spec.split(".py:", 1)
        cls, _, parameters = rest.partition(":")
        return f"{path}.py:{cls}", parameters
    head, _, parameters = spec.partition(":")
    return head, parameters


def _find_class(name: str, folder: Path) -> type[Policy]:
    if name.endswith(".py"):
        raise InputError(f"--policy {name}: say which class of the file, as in {name}:MyPolicy")
    if ".py:" in name:
        path, _, cls = name.rpartition(":")
        return _class_in_file(folder / Path(path).expanduser(), cls)
    for own in OWN:
        if own.name == name:
            return own
    if name in _packaged():
        return _packaged_class(_packaged()[name])
    names = sorted(policy_names())
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"--policy: there is no policy {name!r}; {hint}There are: {', '.join(names)}; or file.py:Class")


@cache
def _packaged() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _packaged_class(point: EntryPoint) -> type[Policy]:
    try:
        found = point.load()
    except Exception as error:
        raise InputError(f"--policy {point.name}: {point.value} cannot be imported: {error}") from error
    return _checked_class(found, f"--policy {point.name}: {point.value}")


def _class_in_file(path: Path, name: str) -> type[Policy]:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    # A name of its own, so that no other module is shadowed; listed, because dataclasses look their module up.
    loader = SourceFileLoader(f"policies of {path.resolve()}", str(path))
    module = types.ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module
    try:
        loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path}: cannot be loaded: {type(error).__name__}: {error}") from error
    there = [n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, Policy) and v is not Policy]
    if not hasattr(module, name):
        raise InputError(f"{path}: has no class {name!r}; its policies are: {', '.join(there) or 'none'}")
    return _checked_class(getattr(module, name), f"{path}: {name}")


def _checked_class(found: Any, what: str) -> type[Policy]:
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        raise InputError(f"{what} is not a subclass of moe_spac.policies.interface.Policy")
    if not hasattr(found, "name"):
        found.name = found.__name__
    return found


def _parse_parameters(spec: str, text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for key, equals, _ in pairs:
        if not equals:
            raise InputError(f"--policy {spec}: {key!r} has no value; write name:key=value,key=value")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _construct(where: str, cls: type[Policy], parameters: Mapping[str, Any]) -> Policy:
    """An object of `cls`, values that are text converted to the types of its fields."""
    types_ = parameter_types(cls)
    for key in parameters:
        if key not in types_:
            near = difflib.get_close_matches(key, types_, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"policy {where}: no parameter {key!r}{hint} It has: {', '.join(types_) or 'none'}")
    values = {key: _convert(f"policy {where}: {key}", value, types_[key]) for key, value in parameters.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise InputError(f"policy {where}: {error}") from error


def parameter_types(cls: type[Policy]) -> dict[str, Any]:
    """A policy's parameters, in order, with their types."""
    if not is_dataclass(cls):
        return {}
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


def _convert(where: str, value: Any, kind: Any) -> Any:
    """`value`, text from a command line or a TOML value, as the type of its field."""
    if get_origin(kind) in (Union, types.UnionType):
        kinds = get_args(kind)
        if type(None) in kinds and value == "none":
            return None
        words = [k for k in kinds if get_origin(k) is Literal and value in get_args(k)]
        kind = next(k for k in [*words, *kinds] if k is not type(None))
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise InputError(f"{where}={value}: must be one of {', '.join(map(str, get_args(kind)))}")
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind is not bool and not isinstance(value, bool) and not (kind is int and isinstance(value, float)):
        with suppress(TypeError, ValueError):
            return kind(value)
    names = {bool: "true or false", int: "a whole number", float: "a number"}
    raise InputError(f"{where}={value}: must be {names.get(kind, getattr(kind, '__name__', kind))}")


def _type_words(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType, Literal):
        return " | ".join(_type_words(k) for k in get_args(kind))
    return "none" if kind is type(None) else str(getattr(kind, "__name__", kind))


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else ""


def _toml_lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{_toml_key(key)} = {_toml('none' if value is None else value)}" for key, value in values.items()]


def _toml_key(key: str) -> str:
    return key if key.replace("-", "_").isidentifier() and key.isascii() else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
