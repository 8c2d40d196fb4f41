"""Compare two traced MAX graphs by structure: a Merkle hash over their dataflow.

Every op hashes over its text and its operands' hashes; a weight hashes by its name and type, a
graph input by its type and position among inputs of that type. Two graphs whose outputs hash equal
compute the same function of the same inputs and weights, operation by operation: no tolerance is
involved. Values of nested regions are not followed; a graph that has them never counts as equal.

Normalisations, each of which keeps the function:

- source locations and SSA numbers are not part of the text;
- ops that neither an output nor a write reads, directly or through others, are left out;
- adding a float zero constant to a value is that value, up to the sign of zero;
- a slice from 0 in steps of 1 whose type is its operand's is the operand;
- a collective with one tensor, one signal buffer and one chain is that tensor and that chain;
- graph inputs keep their order only among inputs of one type: V2 and V3 order them differently.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field

_LOC = re.compile(r"\s+loc\(.*\)$")
_ARG = re.compile(r"(%arg\d+): (!mo\.\w+(?:<[^>]*>)?)")
_WEIGHT = re.compile(r'(%\w+) = mo\.constant\.external \[name = "([^"]+)".*\] : (.*)$')
_OP = re.compile(r"((?:%\w+(?::\d+)?(?:, )?)+) = (.*)$")
_VALUE = re.compile(r"%\w+(?:#\d+)?")
_ADD = re.compile(r"rmo\.add\((%\w+(?:#\d+)?), (%\w+(?:#\d+)?)\)")
_SLICE = re.compile(
    r"rmo\.slice\((?P<value>%[\w#]+)\) \[starts = #mosh<ape\[(?P<starts>[^\]]*)\]> : !mosh\.ape, "
    r"stops = [^\]]*\]> : !mosh\.ape, steps = #mosh<ape\[(?P<steps>[^\]]*)\]> : !mosh\.ape\] : "
    r"\((?P<before>!mo\.tensor<.*>)\) -> (?P<after>!mo\.tensor<.*>)$"
)
_COLLECTIVE = re.compile(
    r"mo\.distributed\.(?:broadcast|allreduce\.sum|allgather|reducescatter\.sum)"
    r"\((?P<value>%[\w#]+), %[\w#]+, (?P<chain>%[\w#]+)\)(?: \[[^\]]*\])? : "
    r"\((?P<before>!mo\.tensor<[^>]*>), !mo\.buffer<[^>]*>, !mo\.chain\) -> "
    r"\((?P<after>!mo\.tensor<[^>]*>), !mo\.chain\)$"
)
_ZERO = re.compile(r"mo\.constant .*dense_array<0\.0+e\+00> : tensor<(bf16|f32|f16)>")


@dataclass
class GraphHash:
    """Hash of one graph.

    Attributes:
        root: Hash of the outputs and of every write, reached by an output or not.
        ops: Hash -> how often it occurs, reachable ops only.
        text: Hash -> the op's text, for messages.
        weights: Name -> type of every weight the graph reads.
        applied: Which normalisations changed something, and how often.
        unknown: Values whose origin was not seen; any makes the hash worthless.
    """

    root: str = ""
    ops: Counter[str] = field(default_factory=Counter)
    text: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    applied: Counter[str] = field(default_factory=Counter)
    unknown: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class GraphDiff:
    """Outcome of a comparison: equal, or ops found on one side only."""

    equal: bool
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    normalisations: tuple[str, ...]


def graph_text(graph: object) -> str:
    """MLIR text of a `max.graph.Graph`, a staged ModuleV3 graph, or text already."""
    if isinstance(graph, str):
        return graph
    operation = getattr(graph, "_mlir_op", None)
    text = str(operation) if operation is not None else str(graph)
    return text if text.count("\n") > 2 else str(graph)


def hash_graph(text: str) -> GraphHash:
    """Merkle hash of a graph's text."""
    result = GraphHash()
    env: dict[str, str] = {}
    zeros: set[str] = set()
    children: dict[str, tuple[str, ...]] = {}
    sinks: list[str] = []
    for raw in text.splitlines():
        line = _LOC.sub("", raw.strip())
        if line.startswith("mo.graph"):
            _inputs(line, env)
        elif not line or line.startswith(("module", "}", "#")):
            continue
        elif weight := _WEIGHT.match(line):
            name, kind = weight.group(2), weight.group(3)
            result.weights[name] = kind
            env[weight.group(1)] = _digest(f"W:{name}:{kind}")
        else:
            _op(line, env, zeros, children, sinks, result)
    result.root = _digest("|".join(sorted(set(sinks)))) if sinks else ""
    _keep_reachable(result, children, sinks)
    return result


def _inputs(line: str, env: dict[str, str]) -> None:
    seen: Counter[str] = Counter()
    for name, kind in _ARG.findall(line):
        seen[kind] += 1
        env[name] = _digest(f"in:{kind}:{seen[kind]}")


def _op(
    line: str,
    env: dict[str, str],
    zeros: set[str],
    children: dict[str, tuple[str, ...]],
    sinks: list[str],
    result: GraphHash,
) -> None:
    match = _OP.match(line)
    left, right = (match.group(1), match.group(2)) if match else ("", line)
    names = [name.strip() for name in left.split(",") if name.strip()]
    repeated = [_lookup(env, value) for value in _repeats(right, zeros, result)]
    if repeated and all(repeated):
        if len(names) == len(repeated):
            env |= dict(zip(names, repeated, strict=True))
            return
        if len(names) == 1 and names[0].endswith(f":{len(repeated)}"):
            base = names[0].split(":")[0]
            env |= {f"{base}#{index}": value for index, value in enumerate(repeated)}
            return
    if _ZERO.match(right) and names:
        zeros.add(names[0])
    used: list[str] = []

    def hashed(found: re.Match[str]) -> str:
        value = found.group(0)
        digest = _lookup(env, value)
        if not digest:
            result.unknown.add(value)
            digest = value
        used.append(digest.split("#")[0])
        return digest

    digest = _digest(_VALUE.sub(hashed, right))
    children[digest] = tuple(used)
    for index, name in enumerate(names):
        base = name.split(":")[0]
        env[base] = digest if len(names) == 1 else _digest(f"{digest}{index}")
        if env[base] != digest:
            children[env[base]] = (digest,)
    if right.startswith("mo.output") or ("!mo.chain" in right and "chain.create" not in right):
        sinks.append(digest)  # results, and whatever writes: MAX orders writes by chains
    result.ops[digest] += 1
    result.text.setdefault(digest, right[:200])


def _lookup(env: dict[str, str], value: str) -> str:
    """Hash of an SSA value, `%5#1` included; empty when its origin was not seen."""
    base, _, index = value.partition("#")
    if value in env:
        return env[value]
    return env[base] + (f"#{index}" if index else "") if base in env else ""


def _repeats(right: str, zeros: set[str], result: GraphHash) -> tuple[str, ...]:
    """The values that an op's results only repeat; empty for an op that computes something."""
    add = _ADD.match(right)
    if add and add.group(2) in zeros:
        result.applied["x + 0 is x"] += 1
        return (add.group(1),)
    cut = _SLICE.match(right)
    if cut and cut["before"] == cut["after"] and _whole(cut["starts"], cut["steps"]):
        result.applied["a slice of everything is the tensor"] += 1
        return (cut["value"],)
    collective = _COLLECTIVE.match(right)
    if collective and collective["before"] == collective["after"]:
        result.applied["a collective over one device is its operand"] += 1
        return (collective["value"], collective["chain"])
    return ()


def _whole(starts: str, steps: str) -> bool:
    """True for starts of 0 and steps of 1 on every axis."""
    return set(starts.split(", ")) == {"0"} and set(steps.split(", ")) == {"1"}


def _keep_reachable(
    result: GraphHash, children: dict[str, tuple[str, ...]], sinks: list[str]
) -> None:
    alive: set[str] = set()
    stack = list(sinks)
    while stack:
        digest = stack.pop()
        if digest not in alive:
            alive.add(digest)
            stack += children.get(digest, ())
    dead = sum(count for digest, count in result.ops.items() if digest not in alive)
    if dead:
        result.applied["ops nothing reads are left out"] += dead
    result.ops = Counter({d: n for d, n in result.ops.items() if d in alive})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def compare_graphs(first: object, second: object) -> GraphDiff:
    """Compare two graphs; `equal` means the outputs' hashes are."""
    one, two = hash_graph(graph_text(first)), hash_graph(graph_text(second))
    unknown = one.unknown | two.unknown
    equal = bool(one.root) and one.root == two.root and not unknown
    left = tuple(one.text[d] for d in one.ops if d not in two.ops)
    right = tuple(two.text[d] for d in two.ops if d not in one.ops)
    names = sorted({*one.applied, *two.applied})
    return GraphDiff(equal, left, right, tuple(names))
