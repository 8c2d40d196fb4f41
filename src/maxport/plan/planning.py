"""The plan of a port: donor, deltas, config map, lane, distribution, quantization, validation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from maxport.checkpoint import Checkpoint
from maxport.checkpoint.summary import size_text
from maxport.errors import MaxportError
from maxport.plan.compare import Comparison
from maxport.plan.donors import Donor, Ranked, donor_print, rank
from maxport.plan.fingerprint import Fingerprint, fingerprint
from maxport.plan.inspection import inspect_checkpoint, serve_command
from maxport.plan.memory import Devices, Estimate, estimate
from maxport.plan.quantization import read_scheme
from maxport.plan.walls import check_walls

#: Share of a device's memory that weights and cache may take; the rest is for activations.
_USABLE = 0.9
#: Tokens of cache a deployment is sized for where the config allows more.
_CONTEXT = 8192
#: Bytes per parameter that a float32 reference and a port need together.
_JUDGED_BYTES = 10
_SHOWN = 5
_DONOR_COLUMNS = [
    "architecture",
    "slug",
    "lane",
    "score",
    "distance",
    "shared",
    "source_shared",
    "deltas",
]


@dataclass(frozen=True)
class Distribution:
    """On how many devices a model runs: `shape` in words, `degree` devices a copy, and why."""

    shape: str
    degree: int
    why: str


@dataclass(frozen=True)
class Plan:
    """Everything `maxport plan` reports; see `to_json`."""

    opened: Checkpoint
    model: Fingerprint
    native: tuple[dict[str, str], ...]
    ranking: tuple[Ranked, ...]
    chosen: Ranked
    config: tuple[dict[str, Any], ...]
    weights: dict[str, list[str]]
    lane: str
    lane_why: str
    distribution: Distribution
    quantization: str
    tier: str
    walls: tuple[dict[str, str], ...]
    paragraph: str = ""

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data (schema: cli/schemas/plan.json)."""
        return {
            "model": self.opened.model,
            "revision": self.opened.revision,
            "architecture": self.opened.architecture,
            "traced": self.model.model,
            "native": list(self.native),
            "donors": [_donor_row(r) for r in self.ranking],
            "donor": _donor_row(self.chosen),
            "deltas": [asdict(delta) for delta in self.chosen.comparison.deltas],
            "config": list(self.config),
            "weights": self.weights,
            "lane": {"choice": self.lane, "why": self.lane_why},
            "distribution": asdict(self.distribution),
            "quantization": self.quantization,
            "validation": self.tier,
            "walls": list(self.walls),
            "paragraph": self.paragraph,
        }


def make_plan(
    opened: Checkpoint,
    devices: Devices,
    *,
    start_from: str | None = None,
    lane: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plan a port of a checkpoint: one twin of it is traced; no weight is read.

    Args:
        opened: The checkpoint.
        devices: What the model is to run on.
        start_from: Slug of the donor to take whatever the ranking says.
        lane: Rank donors of this lane only.
        trust_remote_code: Whether the checkpoint's own code may run.
        progress: Called with what is being done.

    Raises:
        MaxportError: The model cannot be traced, or no such donor.
    """
    progress("tracing a twin")
    model = fingerprint(load_config(opened, trust_remote_code=trust_remote_code))
    ranking = rank(model, lane=lane, progress=lambda t: progress(f"measuring donor {t}"))
    if not ranking:
        raise MaxportError(
            "MAX has no donor whose class the installed transformers can trace",
            fix="install the versions that maxport pins",
        )
    chosen = _choose(ranking, start_from)
    inspection = inspect_checkpoint(opened, start_from=chosen.donor.arch.slug)
    walls = tuple(asdict(wall) for wall in check_walls(opened, devices))
    lane_choice, lane_why = _lane(chosen, ranking)
    plan = Plan(
        opened=opened,
        model=model,
        native=tuple(
            {"name": a.name, "slug": a.slug, "serve": serve_command(opened.model, a)}
            for a in inspection.native
        ),
        ranking=tuple(ranking),
        chosen=chosen,
        config=_config_map(inspection.rows),
        weights=_weight_names(model, chosen.donor),
        lane=lane_choice,
        lane_why=lane_why,
        distribution=distribution(opened, devices),
        quantization=_quantization(opened),
        tier=_tier(opened, devices),
        walls=walls,
    )
    return _with_paragraph(plan)


def load_config(opened: Checkpoint, *, trust_remote_code: bool = False) -> Any:
    """The transformers config object of a checkpoint.

    Raises:
        MaxportError: transformers cannot read it, or it needs code that is not trusted.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(opened.folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # config classes raise whatever their checks raise
        raise MaxportError(
            f"transformers cannot read the configuration: {str(error).splitlines()[0][:200]}",
            where=str(opened.folder),
            fix="check config.json, or pass --trust-remote-code if it brings its own code",
        ) from error


def _choose(ranking: Sequence[Ranked], start_from: str | None) -> Ranked:
    if start_from is None:
        return ranking[0]
    for ranked in ranking:
        if ranked.donor.arch.slug == start_from:
            return ranked
    import difflib

    slugs = sorted({r.donor.arch.slug for r in ranking})
    close = difflib.get_close_matches(start_from, slugs, 3) or slugs[:3]
    raise MaxportError(
        f"{start_from!r} is no donor that can be compared with this model",
        fix=f"did you mean {', '.join(close)}? `maxport list-archs --donors` lists all",
    )


def _donor_row(ranked: Ranked) -> dict[str, Any]:
    arch, found = ranked.donor.arch, ranked.comparison
    return {
        "architecture": arch.name,
        "slug": arch.slug,
        "lane": arch.lane,
        "score": ranked.score,
        "distance": found.distance,
        "source_shared": ranked.likeness,
        "shared": found.shared,
        "weight_names_shared": found.names,
        "deltas": len(found.deltas),
    }


def _config_map(rows: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Each config key: its value, what the donor reads it as, and who else reads it."""
    return tuple(
        {
            "key": row.key,
            "value": row.value,
            "donor": [read.into or "tested" for read in row.reader or ()][:1],
            "pipeline": bool(row.pipeline),
        }
        for row in rows
    )


def _weight_names(model: Fingerprint, donor: Donor) -> dict[str, list[str]]:
    """Weight names of the model and the donor's class that the other lacks."""
    other = donor_print(donor.model_type)
    theirs = set(other.weights) if other else set()
    ours = set(model.weights)
    return {"model_only": sorted(ours - theirs), "donor_only": sorted(theirs - ours)}


def _lane(chosen: Ranked, ranking: Sequence[Ranked]) -> tuple[str, str]:
    arch = chosen.donor.arch
    if arch.lane == "v3":
        return "v3", f"the nearest donor, {arch.slug}, is a ModuleV3 one"
    v3 = next((r for r in ranking if r.donor.arch.lane == "v3"), None)
    extra = ""
    if v3 is not None:
        extra = f"; the nearest ModuleV3 donor is {v3.donor.arch.slug} ({_changes(v3.comparison)})"
    return "v3", f"`maxport port` emits ModuleV3 whatever the donor's lane{extra}"


def distribution(opened: Checkpoint, devices: Devices) -> Distribution:
    """How many devices hold weights and cache: as few as fit, a number that divides the kv heads.

    Args:
        opened: The checkpoint; its headers give the weights' bytes.
        devices: Kind, number and memory of the devices.
    """
    need: Estimate = estimate(opened, devices.kind)
    if not need.weights:
        return Distribution("unknown", 1, "the checkpoint has no weights to measure")
    cache = need.cache_per_token * min(need.context or _CONTEXT, _CONTEXT)
    total = need.weights + cache
    facts = f"{size_text(need.weights)} of weights and {size_text(cache)} of cache"
    if devices.memory is None:
        return Distribution("unknown", 1, f"{facts}; the device's memory could not be read")
    room = devices.memory * _USABLE
    have = f"{devices.count} x {devices.name} of {size_text(devices.memory)}"
    if total <= room:
        return Distribution("one device", 1, f"{facts} fit one {devices.name} ({have})")
    heads = _kv_heads(opened)
    degree = 2
    while total / degree > room and degree < 4096:
        degree *= 2
    split = "" if heads % degree == 0 else f"; {heads} kv heads have to be repeated for {degree}"
    short = "" if degree <= devices.count else f"; this machine has {devices.count}"
    why = f"{facts} need {degree} x {size_text(devices.memory)}{split}{short}"
    return Distribution(f"tensor parallel over {degree} devices", degree, why)


def _kv_heads(opened: Checkpoint) -> int:
    config = opened.config.get("text_config") or opened.config
    names = ("num_key_value_heads", "num_attention_heads", "n_head")
    return next((config[n] for n in names if isinstance(config.get(n), int)), 1)


def _quantization(opened: Checkpoint) -> str:
    scheme = opened.config.get("quantization_config")
    return str(read_scheme(scheme)) if isinstance(scheme, dict) and scheme else "none"


def _tier(opened: Checkpoint, devices: Devices) -> str:
    """What can be verified here: all logits on the weights, or on a twin plus coherence."""
    if not opened.tensors:
        return "logits on a twin: the checkpoint has no weights"
    need = sum(tensor.size for tensor in opened.tensors.values()) * _JUDGED_BYTES
    import psutil  # type: ignore[import-untyped]

    have = int(psutil.virtual_memory().available)
    if need <= have:
        return "logits on the checkpoint's own weights"
    return (
        f"logits on a twin, coherence on the weights: a float32 reference beside the port needs "
        f"{size_text(need)}, {size_text(have)} are free"
    )


def _changes(found: Comparison) -> str:
    count = len(found.deltas)
    return "no change" if not count else f"{count} change{'s' if count > 1 else ''}"


def _with_paragraph(plan: Plan) -> Plan:
    return replace(plan, paragraph=paragraph(plan))


def paragraph(plan: Plan) -> str:
    """The plan in a few sentences, each a default that the reader may veto."""
    arch, found = plan.chosen.donor.arch, plan.chosen.comparison
    parts = []
    if plan.native:
        names = ", ".join(row["name"] for row in plan.native)
        parts.append(f"MAX already registers {names}: `{plan.native[0]['serve']}` serves it as is.")
    share = f"{found.shared:.0%} of the layer code is the donor's"
    parts.append(
        f"Start from {arch.slug} ({arch.name}): {_changes(found)}, {share}."
        if found.deltas
        else f"Start from {arch.slug} ({arch.name}): the traced layers are the same; only sizes, "
        "weights and names differ."
    )
    top = found.deltas[:3]
    if top:
        parts.append("Largest: " + "; ".join(f"{d.component}: {d.change}" for d in top) + ".")
    if plan.weights["model_only"]:
        parts.append(
            f"{len(plan.weights['model_only'])} weight names are not the donor's; the adapter maps "
            "them."
        )
    parts.append(f"Lane {plan.lane}: {plan.lane_why}.")
    parts.append(f"Distribution: {plan.distribution.shape} ({plan.distribution.why}).")
    parts.append(f"Quantization: {plan.quantization}. Validation: {plan.tier}.")
    stops = [wall for wall in plan.walls if wall["level"] == "stop"]
    if stops:
        parts.append("Walls: " + "; ".join(f"{w['need']}: {w['lack']}" for w in stops) + ".")
    return " ".join(parts)


def portdoc_evidence(plan: Plan) -> dict[str, Any]:
    """`plan` and `deltas` sections of a port's PORT.md (`maxport.emit.portdoc`)."""
    return {
        "plan": plan.paragraph,
        "deltas": [
            {
                "component": d.component,
                "reference": d.reference,
                "donor": d.donor,
                "change": d.change,
            }
            for d in plan.chosen.comparison.deltas
        ],
    }


def write_plan(plan: Plan, target: Path, *, force: bool = False) -> Path:
    """Write a plan as Markdown.

    Raises:
        MaxportError: The file exists and `force` is not given.
    """
    if target.exists() and not force:
        raise MaxportError("the plan's file exists", where=str(target), fix="pass --force")
    import tempfile

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as temp:
        temp.write(markdown(plan))
    path = Path(temp.name)
    path.chmod(0o644)
    path.replace(target)
    return target


def markdown(plan: Plan) -> str:
    """The plan as a Markdown page: paragraph, donors, deltas, config map, weight names."""
    from maxport.emit.portdoc import table

    shares = ("shared", "source_shared")
    donors = [
        {k: (f"{v:.0%}" if k in shares and v is not None else str(v)) for k, v in row.items()}
        for row in map(_donor_row, plan.ranking[:_SHOWN])
    ]
    deltas = [
        {**asdict(d), "kinds": ", ".join(d.kinds) or "all", "cost": str(d.cost)}
        for d in plan.chosen.comparison.deltas
    ]
    config = [
        {
            "key": row["key"],
            "value": json.dumps(row["value"])[:60],
            "donor reads it as": ", ".join(row["donor"]) or "not read",
        }
        for row in plan.config
    ]
    parts = [f"# Plan: {plan.opened.architecture}", plan.paragraph, "## Donors"]
    parts.append(table(_DONOR_COLUMNS, donors))
    columns = ["component", "reference", "model", "donor", "change", "kinds", "cost"]
    parts += ["## Deltas", table(columns, deltas) if deltas else "None."]
    parts += ["## Configuration", table(["key", "value", "donor reads it as"], config)]
    names = [{"weight": n, "in": "model"} for n in plan.weights["model_only"]]
    names += [{"weight": n, "in": "donor"} for n in plan.weights["donor_only"]]
    parts += ["## Weight names", table(["weight", "in"], names) if names else "The same."]
    return "\n\n".join(parts) + "\n"
