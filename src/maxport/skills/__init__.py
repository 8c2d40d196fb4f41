"""Agent Skills that drive maxport's commands, and installing them where an agent looks."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from maxport.errors import MaxportError
from maxport.skills.references import render_references

FOLDER = Path(__file__).parent / "library"


@dataclass(frozen=True)
class Skill:
    """One skill: the name agents call it by, what it is for, and its folder."""

    name: str
    description: str
    folder: Path


def skills() -> list[Skill]:
    """The skills that ship with maxport, by name."""
    found = []
    for file in sorted(FOLDER.glob("*/SKILL.md")):
        head = file.read_text("utf-8").split("---", 2)[1]
        name = re.search(r"^name: (.+)$", head, re.M)
        text = re.search(r"^description: >\n((?:  .+\n)+)", head, re.M)
        if name is None or text is None:
            raise MaxportError("a skill has no name or description", where=str(file))
        found.append(Skill(name.group(1).strip(), " ".join(text.group(1).split()), file.parent))
    if not found:
        raise MaxportError("this installation of maxport has no skills", where=str(FOLDER))
    return found


def install(target: Path, *, force: bool = False) -> list[Path]:
    """Copy every skill into a folder of skills, its references made from the installed commands.

    Args:
        target: Folder that holds one folder for each skill; made if missing.
        force: Replace skills of the same name.

    Returns:
        The folders written.

    Raises:
        MaxportError: A skill is there already, or the folder cannot be written.
    """
    present = [target / s.name for s in skills() if (target / s.name).exists()]
    if present and not force:
        raise MaxportError(
            f"{', '.join(path.name for path in present)} installed already",
            where=str(target),
            fix="replace with --force",
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".maxport-skills-", dir=target))
    except OSError as error:
        raise MaxportError(
            f"the folder cannot be written: {error.strerror}", where=str(target), fix="choose --dir"
        ) from error
    try:
        for skill in skills():
            made = staging / skill.name
            shutil.copytree(skill.folder, made)
            for name, text in render_references().get(skill.name, {}).items():
                (made / "references").mkdir(exist_ok=True)
                (made / "references" / name).write_text(text, "utf-8")
        for skill in skills():
            if (target / skill.name).exists():
                shutil.rmtree(target / skill.name)
            (staging / skill.name).rename(target / skill.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [target / skill.name for skill in skills()]
