"""The new value of every config field: sizes by role, scalars near the old ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxport.twin.roles import role_of
from maxport.twin.values import Allocator, FloatTriple, HeadPlan, Triple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Options:
    """One candidate of the search for sizes that build and run."""

    heads: HeadPlan
    window: int | None
    layers: int | None
    floats: bool
    unknown: bool
    fill: bool


# First value and step from which a role's three values are taken.
_START: dict[str, tuple[int, int]] = {
    "intermediate": (136, 8),
    "expert_intermediate": (44, 8),
    "vocab": (211, 14),
    "positions": (416, 16),
    "experts": (10, 2),
    "rank": (26, 4),
    "nope_dim": (18, 4),
    "rope_dim": (8, 4),
    "value_dim": (22, 4),
    "index_dim": (32, 6),
    "state": (9, 2),
    "linear_key_dim": (14, 4),
    "linear_value_dim": (14, 4),
    "dt_rank": (5, 2),
    "scalar_int": (51, 7),
    "scale_positions": (9, 2),
    "small_scalar": (3, 2),
    "small_vocab": (64, 8),
    "small_dim": (48, 8),
    "width": (52, 12),
}
_FIXED: dict[str, Triple] = {
    "one": (1, 1, 1),
    "top_k": (4, 3, 2),
    "index_heads": (4, 8, 16),
    "tiny": (2, 2, 2),
    "top_groups": (1, 1, 1),
    "expert_groups": (2, 2, 2),
    "scan_chunk": (16, 16, 16),
    "block": (4, 4, 4),
    "linear_key_heads": (2, 3, 4),
    "linear_value_heads": (4, 9, 16),
    "kernel": (4, 3, 5),
    "image": (32, 32, 32),
    "patch": (16, 16, 16),
    "mamba_groups": (2, 2, 2),
    "global_kv_heads": (1, 1, 1),
}
_KEEP_SMALL = {"top_k": 1, "expert_groups": 1, "top_groups": 1, "mamba_groups": 1, "patch": 8}
_UNKNOWN_ABOVE = 64
_SCALARS = {"scalar", "eps", "softcap", "clip", "theta", "partial_rotary"}
_ORIGINAL_POSITIONS: Triple = (18, 22, 26)  # short probes must go past it
# Roles whose fields are different quantities, even where a checkpoint gives them one value.
_BY_NAME = {"intermediate", "expert_intermediate", "rank"}
_WINDOWS: dict[str, Triple] = {"window": (5, 6, 7), "chunk": (9, 10, 11)}


class FieldShrinker:
    """New values of one config's fields at one size.

    All three sizes are allocated together and one is picked, so that numbers never coincide
    between sizes either. Fields are visited in the class's order; equal calls give equal values.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        values: Mapping[str, Any],
        canonical: Mapping[str, str],
        options: Options,
        size: int,
        layers: int,
        parent: FieldShrinker | None = None,
    ) -> None:
        self._config, self._values, self._canonical = config, values, canonical
        self._options, self._size, self._layers = options, size, layers
        self._old: dict[str, Any] = {}
        for name, value in values.items():
            role = self._role(name)
            if role and _is_int(value):
                self._old.setdefault(role, value)
        # A nested config shares its parent's numbers: equal sizes stay equal, others differ.
        self._new: dict[Any, Any] = parent._new if parent else {}
        self._pool: Allocator = parent._pool if parent else Allocator()
        self._reserve()

    def value(self, name: str, value: Any) -> Any:
        """The twin's value of field `name`, whose real value is `value`."""
        if isinstance(value, bool) and "kernel" in name:
            return False  # GPU kernels compute the same; twins run on a CPU
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        if "quantization" in name or "compression" in name:
            return None  # twins have plain float weights
        if isinstance(value, Mapping):
            return self._mapping(name, value)
        role = self._role(name)
        if role == "token":
            return self._token(value)
        if role == "keep":
            return value
        if isinstance(value, list | tuple):
            return self._sequence(name, value)
        if _is_int(value) and role in _SCALARS and self._accepts_floats(name):
            return self._float(name, role, float(value))
        if isinstance(value, float):
            return self._float(name, role, value)
        if _is_int(value):
            return self._int(name, role, value)
        return value

    def per_layer(self, name: str, value: Any) -> Any:
        """Numbers inside a per-layer value, whose layers were chosen before."""
        role = self._role(name)
        sizes = {"heads", "kv_heads", "intermediate", "head_dim", "expert_intermediate"}
        if isinstance(value, list | tuple) and value and all(_is_int(v) for v in value):
            if role in sizes or "head" in name:
                role = role if role in sizes else "heads"
                return type(value)(self._int(name, role, v) for v in value)
        elif isinstance(value, list | tuple) and value and all(isinstance(v, float) for v in value):
            return value
        return value

    def filled(self, name: str) -> int:
        """A value for a size the config leaves empty."""
        role = self._role(name) or ""
        return 1 if name == "n_shared_experts" else self._int(name, role, 8)

    def _accepts_floats(self, name: str) -> bool:
        """Whether a number that JSON wrote as an integer may be a float for the config class."""
        annotation = getattr(type(self._config), "__annotations__", {}).get(name)
        return annotation is None or "float" in str(annotation)

    def _role(self, name: str) -> str | None:
        role = role_of(name, self._canonical.get(name))
        scan_only = "state_size" in self._values and "expand" in self._values
        if scan_only and role in ("heads", "head_dim"):
            return {"heads": "mamba_heads", "head_dim": "mamba_head_dim"}[role]
        return role

    def _reserve(self) -> None:
        plan = self._options.heads
        self._pool.reserve(*_ORIGINAL_POSITIONS)
        for role in _WINDOWS:
            self._pool.reserve(*self._window(role))
        for triple in (plan.heads, plan.kv_heads, plan.head_dim, plan.hidden):
            self._pool.reserve(*triple)
        for q, k, d in zip(plan.heads, plan.kv_heads, plan.head_dim, strict=True):
            self._pool.reserve(q * d, k * d, d // 2, q // k)

    # -- integers ---------------------------------------------------------------------------

    def _int(self, name: str, role: str | None, value: int) -> int:
        if value < 0 or (value == 0 and role != "offset"):
            return value
        return int(self._triple(name, role, value)[self._size])

    def _triple(self, name: str, role: str | None, value: int) -> Triple:
        key = (name if role in _BY_NAME else role or name, value)
        if key not in self._new:
            self._new[key] = self._make(name, role, value)
        triple: Triple = self._new[key]
        return triple

    def _make(self, name: str, role: str | None, value: int) -> Triple:
        plan, same = self._options.heads, (value, value, value)
        if role in _KEEP_SMALL and value <= _KEEP_SMALL[role]:
            return same
        latent = self._values.get("kv_lora_rank") is not None
        if role in ("heads", "hidden"):
            return plan.heads if role == "heads" else plan.hidden
        if role == "kv_heads":
            if value == 1:
                return (1, 1, 1)
            return plan.heads if latent else plan.kv_heads
        if role == "head_dim":
            return self._head_dim(value, latent)
        if role == "global_head_dim":
            return self._pool.ints(max(plan.head_dim) + 4, step=4)
        if role == "rotary_dim":
            return self._pool.even_below(plan.head_dim)
        if role == "nope_rope_dim":
            return _sum(self._by_role("nope_dim"), self._by_role("rope_dim"))
        if role == "same_vocab":
            return self._by_role("vocab")
        if role in ("window", "chunk"):
            return self._window(role)
        if role == "double_window":  # half of it on each side of a token
            return _times(self._window("window"), 2)
        if role == "layers":
            return (self._layers,) * 3
        if role in _SCALARS:
            return self._pool.ints(max(round(value * 0.7), 2))
        if role in ("period", "offset", "layer_index", "last_layer_index", "shared_kv_layers"):
            return same
        if role == "positions" and self._dynamic_rope():
            return self._pool.ints(17, step=4)
        if role == "original_positions":
            return _ORIGINAL_POSITIONS
        if role and role.startswith("mamba"):
            return self._mamba(role, same)
        if role in ("width", None) or role not in {**_START, **_FIXED}:
            return self._unknown(role, value)
        if role in _FIXED:
            return _FIXED[role]
        start, step = _START[role]
        if role == "experts" and (self._old.get("expert_groups") or 1) > 1:
            return self._pool.ints(start, step=step, ok=lambda v: v % 2 == 0)
        return self._pool.ints(start, step=step)

    def _by_role(self, role: str) -> Triple:
        return self._triple(role, role, self._old.get(role, 8))

    def _head_dim(self, value: int, latent: bool) -> Triple:
        if not latent:
            return self._options.heads.head_dim
        nope, rope = self._old.get("nope_dim", 0), self._old.get("rope_dim", 0)
        if value == rope + nope:
            return _sum(self._by_role("nope_dim"), self._by_role("rope_dim"))
        return self._by_role("rope_dim" if value == rope else "value_dim")

    def _window(self, role: str) -> Triple:
        if self._options.window:
            w = self._options.window
            return (w, w + 1, w + 2)
        return _WINDOWS[role]

    def _dynamic_rope(self) -> bool:
        """Dynamic scaling starts at max_position_embeddings, so short probes must go past it."""
        rope = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        return isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "dynamic"

    def _mamba(self, role: str, same: Triple) -> Triple:
        """State-space heads: heads x head size must be the expanded width."""
        hidden = self._options.heads.hidden
        expand = next((v for k, v in self._values.items() if k in ("mamba_expand", "expand")), 2)
        widths = [int(expand * h) for h in hidden]
        dims = [next(d for d in (12, 16, 8, 4, 2, 1) if w % (2 * d) == 0) for w in widths]
        if role == "mamba_head_dim":
            return (dims[0], dims[1], dims[2])
        if role == "mamba_width":
            return (widths[0], widths[1], widths[2])
        if role == "mamba_heads":
            heads = [w // d for w, d in zip(widths, dims, strict=True)]
            if "mamba_head_dim" not in self._old:
                return (min(same[0], 2),) * 3
            return (heads[0], heads[1], heads[2])
        return _FIXED["mamba_groups"] if same[0] > 1 else same

    def _unknown(self, role: str | None, value: int) -> Triple:
        """A size with no rule of its own: keep what it equals, shrink it if it is large."""
        same = (value, value, value)
        plan, old = self._options.heads, self._old
        hidden, heads = old.get("hidden", 0), old.get("heads", 0)
        head_dim = old.get("head_dim") or (hidden // heads if heads else 0)
        equal: tuple[tuple[int, Triple], ...] = (
            (hidden, plan.hidden),
            (2 * hidden, _times(plan.hidden, 2)),
            (heads * head_dim, _product(plan.heads, plan.head_dim)),
        )
        if value > 8:
            for number, triple in equal:
                if number == value:
                    return triple
            if old.get("intermediate") == value:
                return self._by_role("intermediate")
        if role != "width" and (value <= _UNKNOWN_ABOVE or not self._options.unknown):
            return same
        start, step = _START["width"]
        return self._pool.ints(start, step=step)

    def _token(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._token(v) for v in value)
        if not _is_int(value) or value < 0:
            return value
        key = ("token", value)
        if key not in self._new:
            self._new[key] = self._pool.ints(3)
        return self._new[key][self._size]

    # -- floats -----------------------------------------------------------------------------

    def _float(self, name: str, role: str | None, value: float) -> float:
        if not self._options.floats and role not in ("eps", "theta"):
            return value
        if value == 0.0 or value != value or abs(value) == float("inf"):
            return value
        return float(self._scalar(name, role, value)[self._size])

    def _scalar(self, name: str, role: str | None, value: float) -> FloatTriple:
        key = ("scalar", name, value)
        if key not in self._new:
            self._new[key] = self._make_scalar(name, role, value)
        triple: FloatTriple = self._new[key]
        return triple

    def _make_scalar(self, name: str, role: str | None, value: float) -> FloatTriple:
        if role == "eps":
            return self._pool.between(1e-3, 6e-3)
        if role == "theta":
            return self._pool.between(300.0, 9000.0)
        if role == "softcap":
            return self._pool.between(2.0, 6.0)
        if role == "clip":
            return self._pool.between(1.1, 2.9)
        if role == "partial_rotary":
            if value >= 1.0:
                return (value,) * 3
            dims = self._pool.even_below(self._rotary_head_dim())
            shares = [r / d for r, d in zip(dims, self._rotary_head_dim(), strict=True)]
            return (shares[0], shares[1], shares[2])
        return self._pool.near(value)

    def _rotary_head_dim(self) -> Triple:
        if self._values.get("kv_lora_rank") is not None and _is_int(self._values.get("head_dim")):
            return self._head_dim(self._values["head_dim"], True)
        return self._options.heads.head_dim

    # -- containers -------------------------------------------------------------------------

    def _mapping(self, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
        if "rope" in name:
            return self._rope(value)
        return {k: self.value(k, v) if isinstance(k, str) else v for k, v in value.items()}

    def _rope(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        new: dict[str, Any] = {}
        for key, value in rope.items():
            if isinstance(value, Mapping):
                new[key] = self._rope(value)
            elif isinstance(value, list) and key.endswith("_factor"):
                new[key] = self._rope_list(key, value, rope)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                new[key] = value
            elif key == "original_max_position_embeddings":
                new[key] = self._by_role("original_positions")[self._size]
            elif self._role(key) in ("theta", "partial_rotary"):
                new[key] = self._float(key, self._role(key), float(value))
            elif key == "factor":
                new[key] = self._pooled(key, value, 2.1, 4.9)
            elif key == "low_freq_factor":
                new[key] = self._pooled(key, value, 0.9, 1.5)
            elif key == "high_freq_factor":
                new[key] = self._pooled(key, value, 3.1, 5.5)
            else:
                new[key] = float(self._scalar(key, "scalar", float(value))[self._size])
        return new

    def _pooled(self, name: str, value: float, low: float, high: float) -> float:
        key = ("rope", name, value)
        if key not in self._new:
            self._new[key] = self._pool.between(low, high, avoid=value)
        return float(self._new[key][self._size])

    def _rope_list(self, key: str, old: list[float], rope: Mapping[str, Any]) -> list[float]:
        """One factor per rotary pair (long rope): as many as the twin has, all different."""
        share = rope.get("partial_rotary_factor", self._values.get("partial_rotary_factor", 1.0))
        head_dim = self._rotary_head_dim()[self._size]
        pairs = head_dim // 2
        if isinstance(share, float) and share < 1.0:
            new_share = self._float("partial_rotary_factor", "partial_rotary", share)
            pairs = int(head_dim * new_share) // 2
        top = 2.5 if key.startswith("long") else 1.4
        return [round(1.0 + (top - 1.0) * (i + 1) / (pairs + self._size), 4) for i in range(pairs)]

    def _sequence(self, name: str, value: Any) -> Any:
        if not self._options.floats or not all(isinstance(v, float) for v in value):
            return value
        return type(value)(
            self._float(f"{name}.{i}", self._role(name), v) for i, v in enumerate(value)
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _times(triple: Triple, factor: int) -> Triple:
    return (triple[0] * factor, triple[1] * factor, triple[2] * factor)


def _product(a: Triple, b: Triple) -> Triple:
    return (a[0] * b[0], a[1] * b[1], a[2] * b[2])


def _sum(a: Triple, b: Triple) -> Triple:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])
