"""A checkpoint's quantization scheme against what the installed MAX parses and runs.

What MAX accepts is read from its sources: the methods `parse_quant_config` recognises, the
strategies its parsers compare with, the devices of each encoding, what the V3 Linear takes.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from maxport.plan.max_source import Found, literal, max_version, resolve
from maxport.plan.native import NativeArch
from maxport.plan.wall import Wall

_QUANT = "max.pipelines.weights.quant"
_ENUMS = "max.pipelines.modeling.config_enums"
_V3_LINEAR = "max.experimental.nn.linear"
_FREE = "use an unquantized (bfloat16) checkpoint of this model"


@dataclass(frozen=True)
class Scheme:
    """What config.json says about quantized weights.

    `encoding` is the MAX encoding such weights need, None if MAX has none for them; `static` and
    `strategy` describe scales ("tensor", "channel", "block", "group").
    """

    method: str
    format: str
    bits: int | None
    strategy: str
    group_size: int | None
    static: bool | None
    encoding: str | None

    def __str__(self) -> str:
        parts = [self.method + (f" {self.format}" if self.format else "")]
        parts += [f"{self.bits} bits"] if self.bits else []
        parts += [f"per {self.strategy}"] if self.strategy else []
        parts += [f"group {self.group_size}"] if self.group_size else []
        parts += ["static scales" if self.static else "dynamic scales"] * (self.static is not None)
        return ", ".join(parts)


def read_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config`: method, format, bits, strategy, group, scales."""
    method = str(quantization.get("quant_method") or "compressed-tensors").lower()
    form = str(
        quantization.get("format")
        or quantization.get("quant_algo")
        or quantization.get("fmt")
        or quantization.get("bnb_4bit_quant_type")
        or ""
    )
    group = _first_group(quantization)
    weights, inputs = _mapping(group.get("weights")), _mapping(group.get("input_activations"))
    bits = _number(weights.get("num_bits"), quantization.get("bits"), quantization.get("w_bit"))
    if quantization.get("load_in_4bit"):
        bits = 4
    elif quantization.get("load_in_8bit"):
        bits = 8
    block = quantization.get("weight_block_size")
    strategy = str(weights.get("strategy") or ("block" if block else ""))
    scheme = str(quantization.get("activation_scheme") or "")
    static = scheme == "static" if scheme else None
    if "dynamic" in inputs:
        static = not inputs["dynamic"]
    if not strategy and method == "fp8":
        strategy = "tensor"
    return Scheme(
        method=method,
        format=form,
        bits=bits,
        strategy=strategy,
        group_size=_number(weights.get("group_size"), quantization.get("group_size")),
        static=static,
        encoding=_encoding(method, form.lower(), str(weights.get("type") or ""), bits),
    )


def quantization_walls(
    quantization: Mapping[str, Any] | None,
    native: Sequence[NativeArch],
    device: str,
    dtypes: Sequence[str],
) -> list[Wall]:
    """Walls of quantized weights on `device` ("cpu" or "gpu"); [] if nothing is quantized.

    `quantization` is the checkpoint's quantization_config; `dtypes` are the stored safetensors
    dtypes, which tell quantized weights without one.
    """
    if not quantization:
        return _undeclared(dtypes)
    scheme = read_scheme(quantization)
    need = f"quantized weights: {scheme} (quantization_config)"
    methods = recognised_methods()
    if scheme.method not in methods:
        lack = f"MAX {max_version()} recognises {', '.join(sorted(methods))} ({_QUANT})"
        return [Wall("stop", "quantization", need, lack, _FREE)]
    if scheme.encoding is None:
        lack = f"MAX {max_version()} has no weight encoding for this format ({_ENUMS})"
        return [Wall("stop", "quantization", need, lack, _FREE)]
    if device not in (devices := encoding_devices().get(scheme.encoding, ())):
        lack = f"MAX runs {scheme.encoding} on {' or '.join(devices) or 'no device'}, not {device}"
        return [Wall("stop", "quantization", need, lack, f"{_FREE}, or a machine with a GPU")]
    if wall := _unparsed(scheme, quantization, need):
        return [wall]
    return [_lane_wall(scheme, native, need)]


def _lane_wall(scheme: Scheme, native: Sequence[NativeArch], need: str) -> Wall:
    """Whether MAX's own architecture or the V3 Linear takes the scheme."""
    serving = [arch for arch in native if scheme.encoding in arch.encodings]
    if serving:
        lack = f"only MAX's own {serving[0].name} ({serving[0].slug}) loads {scheme.encoding}"
        return Wall("review", "quantization", need, lack, f"serve that one, or {_FREE} to port")
    lack = f"ModuleV3's Linear takes only static per-tensor FP8 ({_V3_LINEAR})"
    fits = scheme.encoding == "float8_e4m3fn" and scheme.strategy == "tensor" and scheme.static
    fix = "check the port's logits against the dequantized reference" if fits else _FREE
    return Wall("review" if fits else "stop", "quantization", need, lack, fix)


def _unparsed(scheme: Scheme, quantization: Mapping[str, Any], need: str) -> Wall | None:
    """A value that MAX's parser of this method rejects."""
    checks: list[tuple[str, object, object]] = []
    if scheme.method == "compressed-tensors" and scheme.encoding == "float8_e4m3fn":
        parser = "_parse_compressed_tensors_fp8_config"
        inputs = _mapping(_first_group(quantization).get("input_activations"))
        checks = [
            ("weight strategy", scheme.strategy, _compared(parser, "weight_strategy_str")),
            ("input strategy", inputs.get("strategy"), _compared(parser, "input_strategy_str")),
        ]
    elif scheme.method == "fp8" and scheme.strategy == "block":
        parser = "_parse_blockscaled_fp8_config"
        block = quantization.get("weight_block_size")
        scales = quantization.get("activation_scheme")
        checks = [
            ("weight_block_size", block, _compared(parser, "weight_block_size")),
            ("activation_scheme", scales, _compared(parser, "activation_scheme")),
        ]
    elif scheme.method == "fp8":
        parser = "_parse_tensorwise_fp8_config"
        scales = quantization.get("activation_scheme", "dynamic")
        checks = [("activation_scheme", scales, _compared(parser, "activation_scheme"))]
    for what, value, accepted in checks:
        if accepted and value not in accepted:  # type: ignore[operator]
            lack = f"MAX {max_version()} accepts {what} {accepted}, not {value!r} ({_QUANT})"
            return Wall("stop", "quantization", need, lack, _FREE)
    return None


def _undeclared(dtypes: Sequence[str]) -> list[Wall]:
    packed = [d for d in dtypes if d.startswith(("F8", "F6", "F4", "U8", "I8"))]
    if not packed:
        return []
    return [
        Wall(
            "stop",
            "quantization",
            f"weights stored as {', '.join(packed)}",
            "config.json has no quantization_config that says how to read them",
            _FREE,
        )
    ]


def _first_group(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = _mapping(quantization.get("config_groups"))
    return _mapping(groups.get("group_0") or next(iter(groups.values()), None))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(*values: Any) -> int | None:
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _encoding(method: str, form: str, kind: str, bits: int | None) -> str | None:
    """The MAX encoding for weights of this format; None if none of its encodings is that."""
    if method == "gptq":
        return "gptq"
    text = f"{method} {form}"
    if "fp4" in text or (kind == "float" and bits == 4):
        return "float4_e2m1fnx2"
    if "fp6" in text:
        return "float6_e2m3fn"
    integer = kind == "int" or "int" in form or form == "pack-quantized"
    if "fp8" in text or "float" in form or (kind == "float" and bits == 8 and not integer):
        return "float8_e4m3fn"
    return None


@cache
def recognised_methods() -> frozenset[str]:
    """`quant_method` values that MAX's parse_quant_config does not reject."""
    found = resolve(_QUANT, "parse_quant_config")
    for node in ast.walk(found.node) if found else ():
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn):
            names = literal(Found(_QUANT, node.comparators[0]))
            if isinstance(names, tuple) and all(isinstance(name, str) for name in names):
                return frozenset(names)
    return frozenset()


@cache
def encoding_devices() -> dict[str, tuple[str, ...]]:
    """Encoding -> devices it runs on, from MAX's table."""
    table = literal(resolve(_ENUMS, "_SUPPORTED_DEVICES"))
    return {str(k): tuple(v) for k, v in table.items()} if isinstance(table, dict) else {}


def _compared(function: str, name: str) -> list[object]:
    """Values that a parser compares a variable or config item called `name` with."""
    found = resolve(_QUANT, function)
    values: list[object] = []
    for node in ast.walk(found.node) if found else ():
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            value = literal(Found(_QUANT, node.comparators[0]))
            left = ast.unparse(node.left)
            if value is not None and (left == name or f"'{name}'" in left) and value not in values:
                values.append(value)
    return values
