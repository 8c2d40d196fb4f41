"""The whole migration of a target: classify, plan, rewrite, tidy, write."""

from __future__ import annotations

import gc

from maxport.errors import MaxportError
from maxport.migrate.classify import classify
from maxport.migrate.package import Migrated, migrate_graph
from maxport.migrate.plan import make_plan
from maxport.migrate.target import Target
from maxport.migrate.write import tidy


def migrate(target: Target) -> Migrated | None:
    """Rewrite a V2 target; None when it is V3 already and nothing is to be done.

    Raises:
        MaxportError: not MAX model code, or code of no single generation.
    """
    found = classify(target)
    if found.lane == "v3":
        return None
    if found.lane == "neither":
        raise MaxportError(
            f"not a MAX model: {found.why}",
            where=str(target.path),
            fix="give a folder or file with max.nn layers; see `maxport classify`",
        )
    plan = make_plan(target)
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are many small objects and hold no cycles worth looking for
    try:
        result = migrate_graph(plan)
    finally:
        if collecting:
            gc.enable()
    result.files = tidy(result.files, result.generated)
    return result
