"""A port that starts as one of MAX's own architectures: a skeleton of subclasses, or a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from maxport.checkpoint import open_checkpoint
from maxport.emit.testfile import render_test_file
from maxport.emit.write import target_folder, write_port
from maxport.errors import MaxportError
from maxport.plan.compare import Delta
from maxport.plan.native import serving
from maxport.scaffold.copy import render_copy
from maxport.scaffold.deltas import measured_deltas
from maxport.scaffold.donor import read_donor
from maxport.scaffold.skeleton import Target, render_skeleton

#: Code that comes from a donor keeps the donor's style: only errors are checked.
DONOR_RULES = "E9,F,I"


@dataclass(frozen=True)
class Scaffold:
    """What was written.

    Attributes:
        folder: The port directory.
        name: The name it registers.
        donor: The donor's folder in MAX.
        deltas: Differences to work off, each a TODO in the graph file.
        no_deltas: Why there are no measured differences, or empty.
    """

    folder: Path
    name: str
    donor: str
    deltas: tuple[Delta, ...]
    no_deltas: str


def scaffold(
    model: str,
    start_from: str,
    output_dir: Path,
    *,
    slug: str | None = None,
    full_copy: bool = False,
    with_tests: bool = False,
    measure: bool = True,
    force: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Scaffold:
    """Write a port that starts as a donor.

    Args:
        model: Checkpoint folder or Hub id; only its config.json is used.
        start_from: The donor's folder in max/pipelines/architectures.
        output_dir: Folder to write `<slug>/` into.
        slug: Name of the port; config.json's model type if None.
        full_copy: Copy the donor's files instead of subclassing its classes.
        with_tests: Add a pytest file that compares the port with Hugging Face.
        measure: Trace model and donor and write each difference as a TODO.
        force: Replace an existing port.
        revision: Branch, tag or commit on the Hub.
        trust_remote_code: Whether code in the checkpoint may run.
        progress: Told in a few words what is being done.

    Raises:
        MaxportError: No such checkpoint or donor, or the port cannot be written.
    """
    checkpoint = open_checkpoint(model, revision=revision, trust_remote_code=trust_remote_code)
    hf_class = checkpoint.architecture
    if hf_class is None:
        raise MaxportError("config.json has no architectures", where=str(checkpoint.folder))
    name = slug or str(checkpoint.config.get("model_type", "")).replace("-", "_").replace(".", "_")
    target_folder(output_dir, name, force=force)
    donor = read_donor(start_from)
    registered = f"{hf_class}_ModuleV3" if serving(hf_class) else hf_class
    target = Target(slug=name, hf_class=hf_class, name=registered, model=model)
    deltas: list[Delta] = []
    why = "not measured"
    if measure:
        deltas, why = measured_deltas(
            checkpoint, donor.arch, trust_remote_code=trust_remote_code, progress=progress
        )
    render = render_copy if full_copy else render_skeleton
    files = render(target, donor, deltas)
    if with_tests:
        files |= render_test_file(name, target.stem, model)
    folder = write_port(output_dir, name, files, force, rules=DONOR_RULES)
    return Scaffold(folder, registered, start_from, tuple(deltas), why)
