"""The `maxport` command. Every file beside this one holds one subcommand as `command`.

Commands are imported only when they run, so that `inspect` and `list-keys` load neither torch nor
MAX and `--help` answers at once.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pkgutil
import sys
import warnings
from typing import Any, NoReturn

import click

from maxport import __version__
from maxport.errors import MaxportError


class LazyGroup(click.Group):
    """A click group whose subcommands are the modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands, from the file names."""
        names = (m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
        return sorted(name.removesuffix("_cmd").replace("_", "-") for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module that holds `cmd_name`; None if there is none."""
        if cmd_name not in self.list_commands(ctx):
            return None
        stem = cmd_name.replace("-", "_")
        found = {m.name for m in pkgutil.iter_modules(__path__)}
        module = importlib.import_module(f"{__name__}.{stem if stem in found else stem + '_cmd'}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands with the first line of their module docstring, read without import."""
        rows = [(name, self._summary(name)) for name in self.list_commands(ctx)]
        if not rows:
            return
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _summary(self, name: str) -> str:
        import ast
        from pathlib import Path

        stem = name.replace("-", "_")
        for candidate in (f"{stem}.py", f"{stem}_cmd.py"):
            path = Path(__path__[0]) / candidate
            if path.is_file():
                doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
                return doc.split("\n", 1)[0]
        return ""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="maxport")
def cli() -> None:
    """Bring Hugging Face models to Modular MAX and prove that the port equals the reference.

    Example: maxport port ./SmolLM2-135M-Instruct -o ports
    """


def print_error(error: MaxportError, as_json: bool) -> None:
    """Print one error: JSON on stdout where the command reports JSON, else text on stderr."""
    if as_json:
        body: dict[str, Any] = {"error": error.what, "where": error.where, "fix": error.fix}
        click.echo(json.dumps(body, indent=2))
        return
    click.echo(f"error: {error.what}", err=True)
    if error.where:
        click.echo(f"  where: {error.where}", err=True)
    if error.fix:
        click.echo(f"  fix: {error.fix}", err=True)


def main() -> NoReturn:
    """Run the command, turn expected failures into one message, and raise the exit code."""
    sys.exit(_run())


def program() -> NoReturn:
    """The `maxport` program: `main`, then the process ends at once.

    Tearing the interpreter down takes torch and MAX a second and serves nobody; what is registered
    to happen at exit happens, and output is flushed.
    """
    code = _run()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Nobody may be left to read it: `maxport list-archs | head`.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run() -> int:
    """Run the command; its exit code."""
    # Warnings of torch and transformers are about their own code, not about the user's model.
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code = cli.main(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as ended:
        return _exit_code(ended)
    except click.exceptions.Abort:
        click.echo("stopped; nothing was written", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except MaxportError as error:
        print_error(error, "--json" in sys.argv)
        return error.code


def _exit_code(ended: SystemExit) -> int:
    """What the interpreter would make of `sys.exit(...)`: a text is an error's message."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    click.echo(ended.code, err=True)
    return 1
