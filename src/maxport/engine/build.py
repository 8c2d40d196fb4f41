"""Build the graph of a port or of one of MAX's own architectures, without compiling it.

The architecture's pipeline model is constructed as in serving, from the checkpoint folder, with a
session that records instead of compiling (see `staging`). No tokenizer is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxport.engine import registry
from maxport.engine.inputs import Role, has_cache, input_roles, output_names
from maxport.errors import MaxportError

RETURN_LOGITS = ("last", "all", "variable")
#: Tokens that a graph is built for where neither the caller nor the model sets a longest length.
UNBOUNDED_LENGTH = 2048


@dataclass(frozen=True)
class BuiltGraph:
    """A built MAX graph with all that is needed to run it.

    Attributes:
        graph: The `max.graph.Graph`.
        weights: Graph weight name -> value (driver Buffer or anything with DLPack).
        kv_params: MAX's cache parameters; None for models without a cache.
        roles: What each graph input holds, in graph order.
        outputs: Names of the graph's outputs, in order: `next_token_logits`, `logits`, ...
        vocab_size: Width of the logits.
        lane: `v2` or `v3`.
        return_logits: `last`, `all` or `variable`.
        encoding: Working precision, for example `float32`.
        device: `cpu` or `gpu`.
        max_length: Longest sequence the graph was built for, in tokens.
        architecture: Name under which MAX registers it.
    """

    graph: Any
    weights: Mapping[str, Any]
    kv_params: Any
    roles: tuple[Role, ...]
    outputs: tuple[str, ...]
    vocab_size: int
    lane: str
    return_logits: str
    encoding: str
    device: str
    max_length: int
    architecture: str

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs in graph order, for messages."""
        return tuple(str(role) for role in self.roles)


def build_port(
    port_dir: Path,
    model_dir: Path,
    *,
    return_logits: str = "all",
    device: str = "cpu",
    devices: int = 1,
    encoding: str = "float32",
    max_length: int | None = None,
    check_kernels: bool = True,
    trust_remote_code: bool = False,
) -> BuiltGraph:
    """Build the graph of the port in `port_dir` for the checkpoint in `model_dir`.

    Args:
        port_dir: What `--custom-architectures` takes.
        model_dir: Folder with config.json and safetensors files.
        return_logits: `last`, `all` or `variable`.
        device: `cpu`, or `gpu` (a virtual one where the machine has none).
        devices: How many devices to spread the model over.
        encoding: MAX's name of the working precision; any one, also if serving would refuse it.
        max_length: Longest sequence in tokens; the checkpoint's own limit if None, or
            `UNBOUNDED_LENGTH` if it has none.
        check_kernels: Check every kernel call against its signature, as serving does.
        trust_remote_code: Whether the checkpoint's own code may run.

    Raises:
        MaxportError: The port does not import, is not for this checkpoint, or does not build.
    """
    with registry.loaded_port(port_dir) as architectures:
        class_name = checkpoint_class(model_dir)
        names = {class_name, class_name + registry.V3_SUFFIX}
        matching = [a for a in architectures if getattr(a, "name", None) in names]
        if not matching:
            raise MaxportError(
                f"the port is for {', '.join(str(a.name) for a in architectures)}, "
                f"the checkpoint says {class_name}",
                where=str(port_dir),
                fix="pass the checkpoint that the port was made for",
            )
        return _build(
            matching[0],
            model_dir,
            class_name,
            return_logits=return_logits,
            device=device,
            devices=devices,
            encoding=encoding,
            max_length=max_length,
            check_kernels=check_kernels,
            trust_remote_code=trust_remote_code,
            where=str(port_dir),
        )


def build_native(
    class_name: str,
    model_dir: Path,
    *,
    lane: str = "v3",
    return_logits: str = "all",
    device: str = "cpu",
    devices: int = 1,
    encoding: str = "float32",
    max_length: int | None = None,
    check_kernels: bool = True,
    trust_remote_code: bool = False,
    architecture: Any = None,
) -> BuiltGraph:
    """Build the graph of MAX's own architecture `class_name`; arguments as for `build_port`.

    Args:
        class_name: For example `LlamaForCausalLM`.
        lane: `v2` or `v3`.
        architecture: The `SupportedArchitecture` to build instead of the one MAX finds by name;
            several tasks may share a name.

    Raises:
        MaxportError: MAX registers none in that lane, or its architecture refuses the checkpoint.
    """
    if architecture is None:
        architecture = registry.native_architecture(class_name, lane)
    return _build(
        architecture,
        model_dir,
        checkpoint_class(model_dir),
        return_logits=return_logits,
        device=device,
        devices=devices,
        encoding=encoding,
        max_length=max_length,
        check_kernels=check_kernels,
        trust_remote_code=trust_remote_code,
        where=architecture.name,
    )


def checkpoint_class(model_dir: Path) -> str:
    """`architectures[0]` of the folder's config.json, the name MAX looks up.

    Raises:
        MaxportError: There is no readable config.json, or it has no `architectures`.
    """
    path = Path(model_dir) / "config.json"
    try:
        names = json.loads(path.read_text("utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise MaxportError(f"no readable config.json: {error}", where=str(path)) from error
    if not isinstance(names, list) or not names:
        raise MaxportError(
            "config.json has no architectures",
            where=str(path),
            fix='add "architectures": ["<the model class>"]',
        )
    return str(names[0])


def _build(
    architecture: Any,
    model_dir: Path,
    class_name: str,
    *,
    return_logits: str,
    device: str,
    devices: int,
    encoding: str,
    max_length: int | None,
    check_kernels: bool,
    trust_remote_code: bool,
    where: str,
) -> BuiltGraph:
    if return_logits not in RETURN_LOGITS:
        raise MaxportError(f"return_logits is one of {', '.join(RETURN_LOGITS)}")
    specs = _device_specs(device, devices)
    try:
        with registry.registered(architecture, class_name, encoding) as arch:
            config = _pipeline_config(
                arch, model_dir, specs, encoding, max_length, trust_remote_code
            )
            model, recorded = _construct(arch, config, specs, device, return_logits, check_kernels)
    except MaxportError:
        raise
    except Exception as error:
        raise MaxportError(
            f"the graph does not build: {_first_cause(error)}", where=where, code=1
        ) from error
    kv_params = getattr(model, "kv_params", None)
    staged = _decoder(recorded, kv_params)
    if staged is None:
        raise MaxportError("the pipeline model compiled no decoder graph", where=where, code=1)
    outputs = output_names(staged.outputs, staged.graph, return_logits)
    return BuiltGraph(
        graph=staged.graph,
        weights=staged.weights,
        kv_params=kv_params,
        roles=input_roles(staged.graph, kv_params),
        outputs=outputs,
        vocab_size=_width(staged.graph),
        lane="v2" if staged.outputs is None else "v3",
        return_logits=return_logits,
        encoding=encoding,
        device=device,
        max_length=int(config.model.max_length),
        architecture=str(arch.name),
    )


def _pipeline_config(
    arch: Any,
    model_dir: Path,
    specs: list[Any],
    encoding: str,
    max_length: int | None,
    trust_remote_code: bool,
) -> Any:
    """MAX's PipelineConfig for a folder; what the CLI would build from its flags."""
    from max.pipelines.lib import PipelineArgs, PipelineConfig

    lane_v3 = arch.name.endswith(registry.V3_SUFFIX)

    def config(**length: int) -> Any:
        return PipelineConfig.from_args(
            PipelineArgs(
                model_path=str(model_dir),
                quantization_encoding=encoding,
                device_specs=specs,
                task=arch.task,
                trust_remote_code=trust_remote_code,
                runtime={
                    "prefer_module_v3": lane_v3,
                    "max_batch_size": 4,
                    "device_graph_capture": False,
                    "enable_overlap_scheduler": False,
                },
                **length,
            )
        )

    if max_length:
        return config(max_length=max_length)
    try:
        return config()
    except ValueError:
        # Models that set no bound themselves (ALiBi) want to be told one. What is wrong for
        # another reason is wrong with a length as well, and says so.
        return config(max_length=UNBOUNDED_LENGTH)


def _construct(
    arch: Any,
    config: Any,
    specs: list[Any],
    device: str,
    return_logits: str,
    check_kernels: bool,
) -> tuple[Any, list[Any]]:
    """The pipeline model, its compiles recorded; see max TextGenerationPipeline.__init__."""
    from max.driver import is_virtual_device_mode, load_devices
    from max.graph.weights import load_weights, weights_format
    from max.nn.transformer import ReturnLogits
    from max.pipelines.lib.memory_estimation import MemoryPlan

    from maxport.engine.staging import recording

    loaded = load_devices(specs)
    paths = config.model.resolved_weight_paths()
    plan = MemoryPlan(
        planned_max_batch_size=config.runtime.max_batch_size,
        footprint=0,
        planned_max_length=config.model.max_length,
        planned_max_batch_total_tokens=config.model.max_length,
        device_specs=tuple(specs),
    )
    mode = {
        "last": ReturnLogits.LAST_TOKEN,
        "all": ReturnLogits.ALL,
        "variable": ReturnLogits.VARIABLE,
    }[return_logits]
    simulated = device == "cpu" or is_virtual_device_mode()
    with recording(loaded, simulated=simulated, check_kernels=check_kernels) as session:
        model = arch.pipeline_model(
            pipeline_config=config,
            session=session,
            devices=loaded,
            kv_cache_config=config.model.kv_cache,
            weights=load_weights(paths),
            adapter=arch.weight_adapters.get(weights_format(paths)),
            return_logits=mode,
            max_batch_size=config.runtime.max_batch_size,
            memory_plan=plan,
        )
    return model, session.staged


def _decoder(recorded: list[Any], kv_params: Any) -> Any:
    """The graph that maps tokens to logits: the one with the cache, else that with most weights.

    Pipeline models compile others beside it, for log probabilities and for images.
    """
    if kv_params is None:
        return max(recorded, key=lambda staged: len(staged.weights), default=None)
    decoders = [s for s in recorded if hasattr(s.graph, "inputs") and has_cache(s.graph, kv_params)]
    return decoders[-1] if decoders else None


def _device_specs(device: str, count: int) -> list[Any]:
    """Specs of `count` devices; GPUs become virtual where the machine has too few."""
    from max.driver import DeviceSpec

    if device == "cpu":
        return [DeviceSpec.cpu()] * count
    if device != "gpu":
        raise MaxportError(f"unknown device {device!r}", fix="use cpu or gpu")
    ensure_gpus(count)
    return [DeviceSpec.accelerator(i) for i in range(count)]


def ensure_gpus(count: int, *, api: str = "cuda", target: str = "sm_90a") -> None:
    """Simulate `count` GPUs of one kind unless the machine has that many.

    MAX counts devices once per process, so eight are simulated whatever is asked for.

    Raises:
        MaxportError: More devices are asked for than there are or can be simulated.
    """
    from max import driver

    if not driver.is_virtual_device_mode() and driver.accelerator_count() == 0:
        driver.set_virtual_device_api(api)
        driver.set_virtual_device_target_arch(target)
        driver.set_virtual_device_count(max(8, count))
    if driver.accelerator_count() < count:
        raise MaxportError(
            f"{count} GPUs asked for, {driver.accelerator_count()} found",
            fix="ask for fewer, or run where there is none (they are simulated then)",
        )


def _width(graph: Any) -> int:
    """Width of the first output's rows: the vocabulary, or the embedding size."""
    return int(graph.output_types[0].shape[-1])


def _first_cause(error: BaseException) -> str:
    """The innermost error that says something, as `Type: message` on one line."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    telling = [c for c in causes if str(c).strip()] or causes
    return f"{type(telling[0]).__name__}: {' '.join(str(telling[0]).split())[:600]}"
