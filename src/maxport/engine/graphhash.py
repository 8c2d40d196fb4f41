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
- `shard_and_stack` over one device is a stack, that is, a concatenation of unsqueezed tensors;
- a call of a subgraph is the subgraph's body, its weights named under the call's prefix;
- graph inputs keep their order only among inputs of one type: V2 and V3 order them differently.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field

_LOC = re.compile(r"\s+loc\(.*\)$")
_ARG = re.compile(r"(%arg\d+): (!mo\.\w+(?:<[^>]*>)?)")
_WEIGHT = re.compile(r'(%\w+) = mo.constant.external \[name = "([^"]+)"(.*)\] : (.*)$')
_GRAPH = re.compile(r"mo\.graph @([\w.]+)")
_CALL = re.compile(
    r'mo\.call @(?P<name>[\w.]+)\((?P<values>[^)]*)\)(?: \[prefix = "(?P<prefix>[^"]*)"\])? : '
    r"\((?P<types>.*)\) -> "
)
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
_UNSQUEEZE = re.compile(
    r"rmo\.reshape\(%[\w#]+\) \[newShape = #mosh<ape\[1, (?P<shape>[^\]]*)\]> : !mosh\.ape\] : "
    r"\(!mo\.tensor<\[(?P<before>[^\]]*)\], [^>]*>\) -> "
)
_STACK = re.compile(
    r'(?:rmo\.concat(?=.*\[axis = 0 : index\])|mo\.custom \[symbol = "mo\.shard_and_stack".*?\])'
    r"\((?P<values>[^)]*)\).* -> (?P<after>!mo\.tensor<[^>]*>)$"
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
    """MLIR text of a `max.graph.Graph`, a staged ModuleV3 graph, or text already; its subgraphs'
    text follows its own."""
    if isinstance(graph, str):
        return graph
    graph = getattr(graph, "graph", graph)  # a staged graph holds its graph
    operation = getattr(graph, "_mlir_op", None)
    text = str(operation) if operation is not None else str(graph)
    if "mo.call @" in text and hasattr(graph, "_module"):
        return str(graph._module)
    return text if text.count("\n") > 2 else str(graph)


def hash_graph(text: str) -> GraphHash:
    """Merkle hash of a graph's text: of the first graph in it, the others are its subgraphs."""
    first, subgraphs = _graphs(text)
    walk = _Walk(GraphHash(), subgraphs)
    walk.lines(first, {}, "")
    result, sinks = walk.result, walk.sinks
    result.root = _digest("|".join(sorted(set(sinks)))) if sinks else ""
    _keep_reachable(result, walk.children, sinks)
    return result


def _graphs(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """Lines of the first graph, and of the others by name."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for raw in text.splitlines():
        line = _LOC.sub("", raw.strip())
        if head := _GRAPH.match(line):
            found.append((head.group(1), []))
        found[-1][1].append(line)
    if len(found) == 1:
        return found[0][1], {}
    return found[1][1], dict(found[2:])


@dataclass
class _Walk:
    """One pass over a graph's ops, into the subgraphs it calls.

    Attributes:
        result: What is found.
        subgraphs: Lines of the subgraphs by name.
        zeros: Values of the current body that are float zero constants.
        unsqueezed: Hash of a tensor with a new first axis -> hash of the tensor.
        children: Hash -> hashes of what it reads.
        sinks: Hashes of the outputs and of every write.
    """

    result: GraphHash
    subgraphs: dict[str, list[str]]
    zeros: set[str] = field(default_factory=set)
    unsqueezed: dict[str, str] = field(default_factory=dict)
    children: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sinks: list[str] = field(default_factory=list)

    def lines(self, lines: list[str], env: dict[str, str], prefix: str) -> list[str]:
        """Hash a body; `env` holds a subgraph's arguments and is empty for the graph itself.

        Returns:
            Hashes of a subgraph's results; none for the graph itself, whose results are sinks.
        """
        inside = bool(env)
        for line in lines:
            if line.startswith("mo.graph"):
                if not inside:
                    _inputs(line, env)
            elif not line or line.startswith(("module", "}", "#")):
                continue
            elif weight := _WEIGHT.match(line):
                value, name, options, kind = weight.groups()
                name = prefix + name if "isPlaceholder = true" in options else name
                self.result.weights[name] = kind
                env[value] = _digest(f"W:{name}:{kind}")
            elif inside and line.startswith("mo.output"):
                return [self.read(env, v) for v in _VALUE.findall(line.partition(" : ")[0])]
            else:
                self.op(line, env, prefix)
        return []

    def read(self, env: dict[str, str], value: str) -> str:
        """Hash of a value; a value of unknown origin is noted."""
        digest = _lookup(env, value)
        if not digest:
            self.result.unknown.add(value)
        return digest or value

    def op(self, line: str, env: dict[str, str], prefix: str) -> None:
        """Hash one op into `env`."""
        match = _OP.match(line)
        left, right = (match.group(1), match.group(2)) if match else ("", line)
        names = [name.strip() for name in left.split(",") if name.strip()]
        call = _CALL.match(right)
        same = self.called(call, env, prefix) if call else self.repeated(right, env)
        if same and _bind(env, names, same):
            return
        if _ZERO.match(right) and names:
            self.zeros.add(names[0])
        used: list[str] = []

        def hashed(found: re.Match[str]) -> str:
            digest = self.read(env, found.group(0))
            used.append(digest)
            return digest

        digest = _digest(_VALUE.sub(hashed, right))
        new_axis = _UNSQUEEZE.match(right)
        if new_axis and new_axis["shape"] == new_axis["before"]:
            self.unsqueezed[digest] = used[0]
        stacked = self.stacked(right, used) if len(names) == 1 else []
        if stacked:
            digest, used = stacked[0], stacked[1:]
        self.children[digest] = tuple(value.split("#")[0] for value in used)
        for index, name in enumerate(names):
            base = name.split(":")[0]
            env[base] = digest if len(names) == 1 else _digest(f"{digest}{index}")
            if env[base] != digest:
                self.children[env[base]] = (digest,)
        if right.startswith("mo.output") or ("!mo.chain" in right and "chain.create" not in right):
            self.sinks.append(digest)  # results, and whatever writes: MAX orders writes by chains
        self.result.ops[digest] += 1
        self.result.text.setdefault(digest, right[:200])

    def stacked(self, right: str, used: list[str]) -> list[str]:
        """Hash of a stack and of what it stacks, however it is written; empty for other ops."""
        stack = _STACK.match(right)
        if not stack:
            return []
        parts = (
            used if right.startswith("mo.custom") else [self.unsqueezed.get(u, "") for u in used]
        )
        if not all(parts):
            return []
        if right.startswith("mo.custom"):
            self.result.applied["shard_and_stack over one device is a stack"] += 1
        return [_digest(f"stack:{'|'.join(parts)}:{stack['after']}"), *parts]

    def repeated(self, right: str, env: dict[str, str]) -> list[str]:
        """Hashes of the values that an op only repeats; empty for an op that computes."""
        found = [_lookup(env, value) for value in _repeats(right, self.zeros, self.result)]
        return found if all(found) else []

    def called(self, call: re.Match[str], env: dict[str, str], prefix: str) -> list[str]:
        """Hashes of a subgraph call's results, from its body with the operands put in.

        Empty where the call's types are not literally the body's, so that a symbolic dimension
        always means the same inside as outside.
        """
        lines = self.subgraphs.get(call["name"])
        taken = _ARG.findall(lines[0]) if lines else []
        values = _VALUE.findall(call["values"])
        if not lines or ", ".join(kind for _, kind in taken) != call["types"]:
            self.result.unknown.add(f"@{call['name']}")
            return []
        inner = {name: self.read(env, v) for (name, _), v in zip(taken, values, strict=True)}
        self.result.applied["a call of a subgraph is its body"] += 1
        zeros, self.zeros = self.zeros, set()
        found = self.lines(lines, inner, prefix + (call["prefix"] or ""))
        self.zeros = zeros
        return found


def _bind(env: dict[str, str], names: list[str], values: list[str]) -> bool:
    """Let an op's results stand for `values`; False where their number does not fit."""
    if len(names) == len(values):
        env |= dict(zip(names, values, strict=True))
        return True
    if len(names) == 1 and names[0].endswith(f":{len(values)}"):
        base = names[0].split(":")[0]
        env |= {f"{base}#{index}": value for index, value in enumerate(values)}
        return True
    return False


def _inputs(line: str, env: dict[str, str]) -> None:
    seen: Counter[str] = Counter()
    for name, kind in _ARG.findall(line):
        seen[kind] += 1
        env[name] = _digest(f"in:{kind}:{seen[kind]}")


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
