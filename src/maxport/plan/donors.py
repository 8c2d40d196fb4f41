"""Rank the architectures MAX has by how little of them would have to change for a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from maxport.checkpoint.cache import cache_root, write_whole
from maxport.checkpoint.known import causal_lm_classes
from maxport.errors import MaxportError
from maxport.plan.compare import Comparison, compare
from maxport.plan.fingerprint import SCHEMA, Fingerprint, fingerprint, from_json, to_json
from maxport.plan.native import NativeArch, native_archs
from maxport.plan.source import likeness, rarity, source_lines

#: Fingerprints of the donors' Hugging Face classes, measured by `bench/donors.py --prints`.
SHIPPED = Path(__file__).with_name("donor_prints.json")


#: What a wholly different source adds to a distance, in linear layers. Chosen on the table in
#: bench/results/donors.md: from 35 to 100 the known donor is first for 41 or 42 of its 45 models.
SOURCE = 60.0


@dataclass(frozen=True)
class Donor:
    """An architecture of MAX with the transformers model type whose class it implements."""

    arch: NativeArch
    model_type: str


@dataclass(frozen=True)
class Ranked:
    """One donor's place in a ranking.

    Attributes:
        donor: The donor.
        comparison: What would have to change, and how much that is.
        likeness: Share of the reference source that model and donor have in common, 0 to 1; None
            where the model's source cannot be read.
    """

    donor: Donor
    comparison: Comparison
    likeness: float | None = None

    @property
    def score(self) -> float:
        """What the ranking goes by: the structure's distance plus that of the source."""
        other = 0.0 if self.likeness is None else SOURCE * (1 - self.likeness)
        return round(self.comparison.distance + other, 3)


def donors() -> tuple[Donor, ...]:
    """Every architecture a port can start from whose class transformers has."""
    types: dict[str, str] = {}
    for model_type, class_name in causal_lm_classes().items():
        types.setdefault(class_name, model_type)
    archs = [arch for arch in native_archs() if arch.donor and arch.class_name in types]
    return tuple(Donor(arch, types[arch.class_name]) for arch in archs)


def rank(
    model: Fingerprint,
    *,
    lane: str | None = None,
    without: Iterable[str] = (),
    progress: Callable[[str], None] | None = None,
) -> list[Ranked]:
    """Donors from the nearest on.

    Order: donors whose layers are the model's already; then by `Ranked.score`; at equal score the
    donor that shares more weight names, then the ModuleV3 one, then MAX's own order.

    Args:
        model: The model's fingerprint.
        lane: Only donors of this lane ("v2" or "v3").
        without: Class names to leave out, to ask what one would do if MAX lacked them.
        progress: Called with the model type before a fingerprint has to be measured.
    """
    left_out = set(without)
    prints = {t: donor_print(t, progress) for t in dict.fromkeys(d.model_type for d in donors())}
    sources = {t: source_lines(p.file, p.model) for t, p in prints.items() if p is not None}
    weights = rarity(sources.values())
    ours = source_lines(model.file, model.model)
    found = []
    for donor in donors():
        if donor.arch.class_name in left_out or lane not in (None, donor.arch.lane):
            continue
        known = prints[donor.model_type]
        if known is not None:
            alike = likeness(ours, sources[donor.model_type], weights) if ours else None
            found.append(Ranked(donor, compare(model, known), alike))
    order = {donor.arch.name: index for index, donor in enumerate(donors())}
    return sorted(
        found,
        key=lambda r: (
            r.comparison.distance > 0,
            r.score,
            -r.comparison.names,
            r.donor.arch.lane != "v3",
            order[r.donor.arch.name],
        ),
    )


def donor_print(
    model_type: str, progress: Callable[[str], None] | None = None
) -> Fingerprint | None:
    """A donor's fingerprint, None if its class cannot be traced.

    From the table that ships with maxport if it was measured with the installed transformers,
    else from the user's cache, else measured now (some seconds) and kept.
    """
    row = _shipped().get(model_type)
    if row is None:
        row = cached(model_type)
    if row is None:
        if progress:
            progress(model_type)
        row = measure(model_type)
        keep(model_type, row)
    return from_json(row) if "kinds" in row else None


def measure(model_type: str) -> dict[str, Any]:
    """The fingerprint of a model type's default config as JSON, or {"error": why}."""
    from maxport.twin import default_config

    try:
        return to_json(fingerprint(default_config(model_type)))
    except MaxportError as error:
        return {"error": str(error)}
    except Exception as error:  # a tracing failure only means that this donor cannot be ranked
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def versions() -> dict[str, Any]:
    """What stored fingerprints depend on."""
    return {
        "schema": SCHEMA,
        "transformers": version("transformers"),
        "maxport": version("maxport"),
    }


@cache
def _shipped() -> dict[str, Any]:
    try:
        stored = json.loads(SHIPPED.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    prints: dict[str, Any] = stored["prints"] if stored.get("versions") == versions() else {}
    return prints


def _cache_file(model_type: str) -> Path:
    found = versions()
    return cache_root() / "prints" / "-".join(map(str, found.values())) / f"{model_type}.json"


def keep(model_type: str, row: dict[str, Any]) -> None:
    """Store a measured fingerprint in the user's cache."""
    write_whole(_cache_file(model_type), json.dumps(row))


def cached(model_type: str) -> dict[str, Any] | None:
    """A fingerprint from the user's cache, None if it has none of these versions."""
    try:
        row: dict[str, Any] = json.loads(_cache_file(model_type).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return row
