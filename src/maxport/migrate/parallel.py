"""Tensor parallelism of a migrated package: when V2 has it, with which root, and its helpers.

V2 shards in two ways. Either one root takes lists with one entry per device, whatever their number;
or a second root class is built where there are several devices. Both hold layers that say by
sharding strategies how their weights are split and make their part for each device in `shard`.

V3 keeps one module whose weights lie on a `DeviceMesh`: a strategy becomes a placement, and a
device's part of a layer reads the weight's shard there. `tensor_parallel.py` in the package holds
what the rewritten layers share.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from maxport.migrate.classify import bases_of
from maxport.migrate.registered import registrations
from maxport.migrate.sources import Definition, ModuleSource, Sources, dotted_name

if TYPE_CHECKING:
    from maxport.migrate.kinds import Kinds
    from maxport.migrate.target import Target

#: File of the helpers in the V3 package.
HELPERS = "tensor_parallel"
# What tells a root for several devices from one for a single device, and from data parallelism.
SIGNALS = "signal_buffers"
COLLECTIVES = frozenset(
    {"allreduce.sum", "allgather", "reducescatter.sum", "distributed_broadcast"}
)
_REPLICAS = frozenset({"data_parallel_splits", "split_batch", "split_batch_replicated"})


def several_devices(kinds: Kinds, target: Target) -> bool:
    """Whether V2 registers the target for several GPUs (`multi_gpu_supported=True`)."""
    for found in registrations(kinds, target):
        source = kinds.sources.module(found.module)
        for node in ast.walk(source.tree) if source else ():
            named = isinstance(node, ast.keyword) and node.arg == "multi_gpu_supported"
            if named and ast.unparse(node.value) == "True":  # type: ignore[attr-defined]
                return True
    return False


def parallel_root(kinds: Kinds, root: Definition, built: set[Definition]) -> Definition | None:
    """The class that V2's pipeline models build instead of `root` where there are several devices.

    Args:
        kinds: The judge of names.
        root: The root for a single device.
        built: Classes that the target's pipeline models construct.

    Returns:
        None where `root` itself takes lists with one entry per device.
    """
    if SIGNALS in _mentions(kinds, root):
        return None
    found = [
        other
        for other in built - {root}
        if kinds.of(other) == "layer"
        and SIGNALS in (names := _mentions(kinds, other))
        and not names & _REPLICAS
        and _has_entry(kinds, other)
    ]
    return min(found, key=lambda d: d.dotted, default=None)


def _class(kinds: Kinds, at: Definition) -> tuple[ModuleSource | None, ast.ClassDef | None]:
    source = kinds.sources.module(at.module)
    return source, source.classes.get(at.name) if source else None


def _mentions(kinds: Kinds, at: Definition) -> set[str]:
    """Names, parameters and keywords that a class's own code has."""
    _, node = _class(kinds, at)
    found: set[str] = set()
    for item in ast.walk(node) if node else ():
        if isinstance(item, ast.Name):
            found.add(item.id)
        elif isinstance(item, ast.arg | ast.keyword) and item.arg:
            found.add(item.arg)
    return found


def _has_entry(kinds: Kinds, at: Definition) -> bool:
    _, node = _class(kinds, at)
    return any(isinstance(n, ast.FunctionDef) and n.name == "trace" for n in node.body if node)  # type: ignore[union-attr]


def collective(sources: Sources, module: str, called: str) -> str:
    """The collective that `called` in `module` means, without `ops.`; empty for anything else."""
    head, _, rest = called.partition(".")
    if head == "self" and rest == "allreduce":
        return "allreduce.sum"
    is_op = bool(rest) and sources.resolve(module, head).dotted == "max.graph.ops"
    return rest if is_op and rest in COLLECTIVES else ""


def signals_removable(kinds: Kinds, modules: list[str], carried: Mapping[str, set[str]]) -> bool:
    """Whether V2's signal buffers are only ever handed on, down to collectives.

    Args:
        kinds: The judge of names.
        modules: Modules of the package's graph.
        carried: For modules of which only some names are brought over, those names.
    """
    for name in modules:
        source = kinds.sources.module(name)
        if source is None:
            continue
        for node in source.tree.body:
            if name in carried and getattr(node, "name", "") not in carried[name]:
                continue
            if not all(_handed_on(kinds, source, *use) for use in _signal_uses(node)):
                return False
    return True


def _signal_uses(root: ast.AST) -> Iterator[tuple[ast.Name, ast.AST]]:
    """Every use of the name, with the node around it."""
    for parent in ast.walk(root):
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.Name) and child.id == SIGNALS:
                yield child, parent


def _handed_on(kinds: Kinds, source: ModuleSource, name: ast.Name, parent: ast.AST) -> bool:
    if isinstance(parent, ast.Assign):
        return isinstance(name.ctx, ast.Store)  # from the graph's inputs
    if isinstance(parent, ast.keyword):
        return parent.arg == SIGNALS
    if isinstance(parent, ast.List):
        return True
    if not isinstance(parent, ast.Call) or name is parent.func:
        return False
    called = dotted_name(parent.func)
    if collective(kinds.sources, source.name, called):
        return True
    head = called.split(".")[0]
    known = head in source.imports or head in source.functions
    return not known or kinds.of(kinds.sources.resolve(source.name, called)) == "layer"


def weight_attributes(kinds: Kinds, modules: list[str]) -> frozenset[str]:
    """Attributes that classes of these modules store a `Weight` under."""
    found: set[str] = set()
    for name in modules:
        source = kinds.sources.module(name)
        for node in source.classes.values() if source else ():
            found |= _weights_of(kinds, source, node)  # type: ignore[arg-type]
    return frozenset(found)


def _weights_of(kinds: Kinds, source: ModuleSource, node: ast.ClassDef) -> set[str]:
    def is_weight(value: ast.AST | None) -> bool:
        names = (item.id for item in ast.walk(value) if isinstance(item, ast.Name)) if value else ()
        found = (kinds.sources.resolve(source.name, n) for n in names if n in source.imports)
        return any(at.dotted == "max.graph.weight.Weight" for at in found)

    found: set[str] = set()
    for item in ast.walk(node):
        if isinstance(item, ast.AnnAssign):
            target = dotted_name(item.target)
            if is_weight(item.annotation):
                found.add(target.removeprefix("self."))
        elif isinstance(item, ast.Assign) and isinstance(item.value, ast.Call):
            called = item.value.func
            if isinstance(called, ast.Name) and is_weight(called):
                found |= {
                    t.removeprefix("self.")
                    for t in map(dotted_name, item.targets)
                    if t.startswith("self.")
                }
    return {name for name in found if name.isidentifier()}


def devices_of(kinds: Kinds, module: str, name: str) -> str:
    """`self.<attribute>` under which a class or one of its bases keeps its devices; else empty."""
    queue, seen = [Definition(module, name)], set()
    while queue:
        at = queue.pop(0)
        source, node = _class(kinds, at)
        if at in seen or source is None or node is None:
            continue
        seen.add(at)
        for item in ast.walk(node):
            targets = item.targets if isinstance(item, ast.Assign) else []
            if isinstance(item, ast.AnnAssign):
                targets = [item.target]
            if any(dotted_name(t) in ("self.devices", "devices") for t in targets):
                return "self.devices"
        queue += bases_of(kinds.sources, source, node)
    return ""


def declared(kinds: Kinds, module: str, name: str, attribute: str) -> bool:
    """Whether a base class of `name` declares an attribute."""
    queue, seen = [Definition(module, name)], set[Definition]()
    while queue:
        at = queue.pop(0)
        source, node = _class(kinds, at)
        if at in seen or source is None or node is None:
            continue
        seen.add(at)
        for item in node.body if at.name != name else ():
            if isinstance(item, ast.AnnAssign) and dotted_name(item.target) == attribute:
                return True
        queue += bases_of(kinds.sources, source, node)
    return False


HELPERS_TEXT = '''"""Tensor parallelism: weights placed on a mesh of devices, layers split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from max.driver import Device
from max.experimental import functional as F
from max.experimental.nn import Module
from max.experimental.nn.common_layers.mesh_axis import TP
from max.experimental.sharding import (
    DeviceMapping,
    DeviceMesh,
    Partial,
    Placement,
    Replicated,
    Sharded,
)
from max.experimental.tensor import Tensor, default_device
from max.graph import DeviceRef, ShardingStrategy, TensorValue, ops


def mesh_of(devices: Sequence[Device]) -> DeviceMesh:
    """All devices in one row, along the tensor-parallel axis."""
    return DeviceMesh(tuple(devices), (len(devices),), (TP,))


_MESH: ContextVar[DeviceMesh | None] = ContextVar("_MESH", default=None)


@contextmanager
def placing_on(devices: Sequence[Device]) -> Iterator[None]:
    """Layers built here place the weights they split on all devices, all others on the first."""
    token = _MESH.set(mesh_of(devices))
    try:
        with default_device(devices[0]):
            yield
    finally:
        _MESH.reset(token)


def require_split(model: Module[..., Any]) -> None:
    """Raises where a model that was built for several devices would run on the first alone.

    Raises:
        NotImplementedError: no weight lies on several devices.
    """
    if not any(weight.is_distributed for _, weight in model.parameters):
        raise NotImplementedError("maxport: no weight of this model is split over the devices")


# --- weights -------------------------------------------------------------------------------------


def place(layer: Module[..., Any], name: str, strategy: ShardingStrategy) -> None:
    """Places the weight `name` of a layer on the devices as a sharding strategy says.

    On one device the weight stays where it is. So does, whole, a weight whose strategy is more than
    a split along one axis; `local_shards` cuts it where it is used.
    """
    vars(layer).setdefault("weight_strategies", {})[name] = strategy
    mesh, weight, placement = _MESH.get(), getattr(layer, name), placement_of(strategy)
    if mesh is None or mesh.num_devices == 1 or mesh.num_devices != strategy.num_devices:
        return
    if isinstance(weight, Tensor) and placement is not None:
        setattr(layer, name, weight.to(DeviceMapping(mesh, (placement,))))


def placement_of(strategy: ShardingStrategy) -> Placement | None:
    """The placement that means the same as a strategy; None if none does.

    A row-wise split is a column-parallel layer and the other way round: weights are stored as
    (output, input).
    """
    if strategy.is_replicate:
        return Replicated()
    if strategy.is_rowwise or strategy.is_colwise or strategy.is_axiswise:
        assert strategy.sharded_axis is not None
        return Sharded(strategy.sharded_axis)
    if strategy.is_head_aware_colwise:
        heads = strategy.shard.keywords["num_heads"]  # type: ignore[attr-defined]
        return Sharded(1) if heads % strategy.num_devices == 0 else None
    return None


def strategy_of(layer: Module[..., Any], name: str) -> Any:
    """The ShardingStrategy of a layer's weight `name`; None before `place` was called for it."""
    return vars(layer).get("weight_strategies", {}).get(name)


def local_shards(
    layer: Module[..., Any], name: str, devices: Iterable[DeviceRef]
) -> list[Tensor]:
    """The part of the weight `name` that each device holds.

    Raises:
        ValueError: no strategy says how to split it.
    """
    weight = getattr(layer, name)
    if weight.is_distributed:
        held = map(DeviceRef.from_device, weight.mesh.devices)
        parts = dict(zip(held, weight.local_shards, strict=True))
        return [parts[device] for device in devices]
    strategy = strategy_of(layer, name)
    if strategy is None:
        raise ValueError(f"no strategy says how to split {name} of {type(layer).__name__}")
    whole = TensorValue(weight)
    return [
        Tensor.from_graph_value(strategy(whole, index).to(device))  # type: ignore[arg-type]
        for index, device in enumerate(devices)
    ]


def shard_and_stack(
    weights: Sequence[Tensor], devices: Sequence[DeviceRef], axis: int = 0
) -> list[Tensor]:
    """Stacks several weights on each device, there only the device's part of each."""
    if not any(weight.is_distributed for weight in weights):
        values = ops.shard_and_stack([TensorValue(w) for w in weights], devices, axis=axis)
        return [Tensor.from_graph_value(value) for value in values]
    parts = [weight.local_shards for weight in weights]
    return [F.stack([part[index] for part in parts]) for index in range(len(devices))]


# --- layers --------------------------------------------------------------------------------------


def shards_of(layer: Any, devices: Sequence[DeviceRef]) -> list[Any]:
    """A layer's part on each device; on one device the layer itself."""
    return [layer] if len(devices) == 1 else list(layer.shard(devices))


# --- collectives: lists with one entry per device ------------------------------------------------


def _joined(xs: Sequence[Tensor], placement: Placement) -> Tensor:
    mesh = mesh_of([x.device for x in xs])
    return Tensor.from_shard_values(list(xs), DeviceMapping(mesh, (placement,)))


def allreduce_sum(xs: Sequence[Tensor]) -> list[Tensor]:
    """Every device gets the sum over all devices."""
    if len(xs) == 1:
        return list(xs)
    return list(F.allreduce_sum(_joined(xs, Partial())).local_shards)


def allgather(xs: Sequence[Tensor], axis: int = 0) -> list[Tensor]:
    """Every device gets all parts, joined along `axis`."""
    if len(xs) == 1:
        return list(xs)
    axis = axis % xs[0].rank
    return list(F.allgather(_joined(xs, Sharded(axis)), tensor_axis=axis).local_shards)


def reduce_scatter(xs: Sequence[Tensor], axis: int = 0) -> list[Tensor]:
    """Every device gets its part, along `axis`, of the sum over all devices."""
    if len(xs) == 1:
        return list(xs)
    return list(F.reduce_scatter(_joined(xs, Partial()), scatter_axis=axis).local_shards)


def broadcast(x: Tensor, devices: Sequence[DeviceRef]) -> list[Tensor]:
    """Every device gets a copy of a tensor that lies on the first."""
    if len(devices) == 1:
        return [x]
    mesh = mesh_of([device.to_device() for device in devices])
    return list(F.distributed_broadcast(x, mesh).local_shards)
'''
