"""Run `max generate` and say which architecture answered (`python -m maxport.engine.generate`).

The arguments are `max generate`'s own. MAX's command runs unchanged, in this process; the last line
on stderr is JSON: the architecture's name and the file of its pipeline model.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any


def main(arguments: list[str]) -> None:
    """Run `max generate ARGUMENTS` with the look-up of architectures observed."""
    from max._entrypoints.pipelines import main as max_main
    from max.pipelines.lib.arch_lookup import ArchLookup as lookup

    find = lookup.find
    answered: list[Any] = []

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = find(self, *args, **kwargs)
        if found is not None:
            answered.append(found)
        return found

    lookup.find = observed
    sys.argv = ["max", "generate", *arguments]
    try:
        max_main()
    finally:
        if answered:
            model = answered[-1].pipeline_model
            facts = {"architecture": answered[-1].name, "file": inspect.getfile(model)}
            print(json.dumps(facts), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
