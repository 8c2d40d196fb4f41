"""The same as `maxport scaffold`, under the name that older instructions use."""

import sys

from maxport.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["scaffold"]
    main()
