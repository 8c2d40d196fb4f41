"""The codemods, one file each, in the order they run.

`entry` goes first because it moves V2's graph inputs into a method the others then rewrite;
`imports` goes last because it settles what the others left. Between them the order is free of
overlaps: each looks for V2 constructs that no other one produces, which is also why a second run
changes nothing.
"""

from __future__ import annotations

from maxport.migrate.codemods.constructors import Constructors
from maxport.migrate.codemods.containers import Containers
from maxport.migrate.codemods.entry import Entry
from maxport.migrate.codemods.imports import Imports
from maxport.migrate.codemods.operations import Operations
from maxport.migrate.codemods.parallel import Parallel
from maxport.migrate.codemods.parallel_signals import Signals
from maxport.migrate.codemods.sharding import Sharding
from maxport.migrate.codemods.subgraphs import Subgraphs
from maxport.migrate.codemods.surface import Surface
from maxport.migrate.codemods.values import Values
from maxport.migrate.codemods.weights import Weights
from maxport.migrate.rewrite import Codemod

ORDER: tuple[type[Codemod], ...] = (
    Entry,
    Surface,
    Subgraphs,
    Sharding,
    Constructors,
    Containers,
    Weights,
    Operations,
    Values,
    Imports,
)


def order_for(parallel: bool, signals: bool = False) -> tuple[type[Codemod], ...]:
    """The codemods for a package.

    Args:
        parallel: V2 has tensor parallelism, which `Parallel` keeps.
        signals: Its signal buffers can go, which `Signals` does.
    """
    if not parallel:
        return ORDER
    order = [Parallel if made is Sharding else made for made in ORDER]
    return tuple([order[0], Signals, *order[1:]] if signals else order)
