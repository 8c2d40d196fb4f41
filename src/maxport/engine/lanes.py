"""Build one model's root module in both generations, from the very same configuration.

The V2 pipeline model is constructed as in serving, up to compilation; what its root module was
given (config and all) is kept, and both generations' roots are then constructed from it and traced.
Nothing is compiled and no weights are read.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from maxport.errors import MaxportError

MODES = ("LAST_TOKEN", "VARIABLE", "ALL")
BATCH = ("tokens", "return_n_logits", "input_row_offsets")


class _Recorded(BaseException):
    """Ends the V2 pipeline model's construction once its root is traced; not an error."""


@dataclass
class RootCall:
    """What the V2 root was constructed and traced with, and the pipeline's cache parameters."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    input_types: tuple[Any, ...]
    kv_params: Any
    device: str


@dataclass
class LaneGraph:
    """One generation's graph: the traced graph, its parameters as name -> (shape, dtype)."""

    graph: Any
    parameters: dict[str, tuple[tuple[int, ...], str]]
    input_types: tuple[Any, ...]


def record_root(
    module: str,
    name: str,
    class_name: str,
    model_dir: Path,
    *,
    device: str = "cpu",
    devices: int = 1,
    encoding: str = "float32",
    architecture: Any = None,
) -> RootCall:
    """Build the V2 architecture once and keep what its root was given.

    Args:
        module, name: The V2 root class.
        class_name: Registered architecture name, e.g. `LlamaForCausalLM`.
        model_dir: Twin checkpoint.
        device, devices, encoding, architecture: As in `build_native`.

    Raises:
        MaxportError: the architecture does not build, or never constructs that class.
    """
    from max.nn.layer import Module

    from maxport.engine.build import build_native

    cls = getattr(importlib.import_module(module), name)
    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    types: list[tuple[Any, ...]] = []
    original_init, original_trace = cls.__init__, cls.trace

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            seen.append((self, args, kwargs))
        original_init(self, *args, **kwargs)

    def trace(self: Any, *input_types: Any, **kwargs: Any) -> Any:
        if type(self) is cls:
            types.append(input_types)
            raise _Recorded
        return original_trace(self, *input_types, **kwargs)

    with (
        mock.patch.object(cls, "__init__", init),
        mock.patch.object(cls, "trace", trace),
        # The twin's weights play no part here, and some architectures refuse a float32 twin's.
        mock.patch.object(Module, "load_state_dict", _named),
        mock.patch.object(Module, "state_dict", lambda self, *args, **kwargs: {}),
        suppress(_Recorded),
    ):
        build_native(
            class_name,
            model_dir,
            lane="v2",
            return_logits="last",
            device=device,
            devices=devices,
            encoding=encoding,
            max_length=128,
            architecture=architecture,
        )
    if not seen or not types:
        raise MaxportError(
            f"building {class_name} never constructs {module}.{name}", where=str(model_dir), code=1
        )
    _, args, kwargs = seen[-1]
    values = [*args, *kwargs.values()]
    kv_params = next((v.kv_params for v in values if hasattr(v, "kv_params")), None)
    return RootCall(cls, args, kwargs, types[-1], kv_params, device)


def _named(module: Any, *args: Any, **kwargs: Any) -> None:
    """Give weights their names, as loading them would."""
    for name, weight in module.raw_state_dict().items():
        weight.name = name


def _with_mode(call: RootCall, mode: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Constructor arguments with `return_logits` set on every config among them."""
    from max.nn.transformer import ReturnLogits

    def changed(value: Any) -> Any:
        if mode is None or not hasattr(value, "return_logits"):
            return value
        value = copy.copy(value)
        value.return_logits = ReturnLogits[mode]
        return value

    return tuple(map(changed, call.args)), {k: changed(v) for k, v in call.kwargs.items()}


def in_bfloat16(call: RootCall) -> RootCall:
    """The same call with bfloat16 for float32: in configs, cache parameters and input types.

    For layers that insist on bfloat16, where the CPU pipeline would only build float32.
    """
    from max.dtype import DType

    def retyped(value: Any) -> Any:
        if getattr(value, "dtype", None) == DType.float32:
            value = copy.copy(value)
            object.__setattr__(value, "dtype", DType.bfloat16)
        if isinstance(children := getattr(value, "children", None), dict):
            value = copy.copy(value)
            inner = {key: retyped(child) for key, child in children.items()}
            object.__setattr__(value, "children", inner)
        if (kv_params := getattr(value, "kv_params", None)) is not None:
            value = copy.copy(value)
            object.__setattr__(value, "kv_params", retyped(kv_params))
        return value

    def retyped_input(kind: Any) -> Any:
        if kind.dtype != DType.float32:
            return kind
        return type(kind)(DType.bfloat16, kind.shape, kind.device)

    return RootCall(
        call.cls,
        tuple(map(retyped, call.args)),
        {key: retyped(value) for key, value in call.kwargs.items()},
        tuple(map(retyped_input, call.input_types)),
        retyped(call.kv_params),
        call.device,
    )


def holds_layers(call: RootCall) -> bool:
    """Whether the root was handed V2 layers, which a V3 root cannot be constructed from."""
    from max.nn.layer import Module

    values = [*call.args, *call.kwargs.values()]
    inner = [item for value in values if isinstance(value, list | tuple) for item in value]
    return any(isinstance(value, Module) for value in [*values, *inner])


def modes_of(call: RootCall) -> tuple[str | None, ...]:
    """The ReturnLogits modes a root knows; `(None,)` for encoders."""
    values = [*call.args, *call.kwargs.values()]
    return MODES if any(hasattr(v, "return_logits") for v in values) else (None,)


def trace_v2(call: RootCall, mode: str | None) -> LaneGraph:
    """Construct and trace the V2 root; weights are named by their place in the module."""
    from max.driver import CPU

    from maxport.engine.staging import recording

    args, kwargs = _with_mode(call, mode)
    with recording([CPU()], simulated=call.device == "cpu"):
        model = call.cls(*args, **kwargs)
    weights = model.raw_state_dict()
    for key, weight in weights.items():
        weight.name = key
    graph = model.trace(*call.input_types)
    parameters = {
        key: (tuple(int(d) for d in weight.shape), str(weight.dtype.name))
        for key, weight in weights.items()
    }
    return LaneGraph(graph, parameters, call.input_types)


@contextmanager
def inputs_unnamed() -> Iterator[None]:
    """Build graphs without telling what inputs hold: encoders' batches have no cache roles."""
    from maxport.engine import build

    with mock.patch.object(build, "input_roles", lambda graph, kv_params: ()):
        yield


@contextmanager
def imported(package: Path) -> Iterator[str]:
    """Make a package importable by its folder name for a while; forget its modules afterwards."""
    name = package.name
    sys.path.insert(0, str(package.parent))
    importlib.invalidate_caches()
    try:
        yield name
    finally:
        sys.path.remove(str(package.parent))
        for key in [k for k in sys.modules if k == name or k.startswith(name + ".")]:
            del sys.modules[key]


@contextmanager
def placed(package: str, folder: Path) -> Iterator[None]:
    """Let the package in `folder` be imported as `package` for a while, relative imports included.

    A copy of one of MAX's architectures then stands in the original's place.
    """
    mine = {k: v for k, v in sys.modules.items() if f"{k}.".startswith(f"{package}.")}
    for key in mine:
        del sys.modules[key]
    spec = importlib.util.spec_from_file_location(
        package, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    keep_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
        yield
    finally:
        sys.dont_write_bytecode = keep_bytecode
        for key in [k for k in sys.modules if f"{k}.".startswith(f"{package}.")]:
            del sys.modules[key]
        sys.modules.update(mine)


def trace_v3(cls: type, call: RootCall, mode: str | None) -> LaneGraph:
    """Construct the V3 root from the same arguments and trace it."""
    import inspect

    from max.driver import CPU, Accelerator
    from max.experimental import functional as F
    from max.experimental.tensor import default_device, default_dtype

    args, kwargs = _with_mode(call, mode)
    dtype = next(v.dtype for v in [*args, *kwargs.values()] if hasattr(v, "dtype"))
    device = CPU() if call.device == "cpu" else Accelerator()
    with F.lazy(), default_dtype(dtype), default_device(device):
        model: Any = cls(*args, **kwargs)
        model.to(device)
    parameters = {
        key: (tuple(int(d) for d in value.shape), str(value.dtype.name))
        for key, value in model.parameters
    }
    names = list(inspect.signature(cls.forward).parameters)[1:4]  # type: ignore[attr-defined]
    types = call.input_types
    if tuple(names[:2]) == BATCH[:2]:
        types = _v3_types(call, device)
    staged = model.trace(*types)
    return LaneGraph(staged, parameters, types)


def _v3_types(call: RootCall, device: Any) -> tuple[Any, ...]:
    """V3's input types: MAX's own for a ragged batch with a cache, and V2's further ones."""
    from max.graph import DeviceRef
    from max.pipelines.lib.interfaces.batch_processor import modulev3_ragged_kv_symbolic_inputs

    usual = tuple(
        modulev3_ragged_kv_symbolic_inputs(
            kv_params=call.kv_params, device_refs=[DeviceRef.from_device(device)]
        )
    )
    given = [kind for kind in call.input_types if not _is_signal(kind)]
    if len(given) == len(usual):
        return usual
    tokens, offsets, count, *rest = given  # V2's order; states beside the cache follow it
    return tokens, count, offsets, *rest


def _is_signal(kind: Any) -> bool:
    """Whether an input only synchronises devices."""
    return type(kind).__name__ == "BufferType" and kind.dtype.name == "uint8" and kind.rank == 1
