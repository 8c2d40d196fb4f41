"""`python -m maxport`."""

from maxport.cli import main

if __name__ == "__main__":
    main()
