"""The same as `maxport gates`, under the name that older instructions use."""

import sys

from maxport.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["gates"]
    main()
