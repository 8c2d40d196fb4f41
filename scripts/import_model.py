"""One entry for every step of importing a model; each is the maxport command of the same name.

Usage: python scripts/import_model.py STEP [OPTIONS], where STEP is one of STEPS.
"""

import sys

from maxport.cli import main

STEPS = ("inspect", "scaffold", "list-archs", "check-walls", "list-keys", "gates", "compare")

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in STEPS:
        main()
    asked_for_help = len(sys.argv) > 1 and sys.argv[1] in ("-h", "--help")
    print(f"usage: import_model.py {{{','.join(STEPS)}}} ...", file=sys.stderr)
    sys.exit(0 if asked_for_help else 2)
