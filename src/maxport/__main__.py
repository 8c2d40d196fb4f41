"""`python -m maxport`."""

from maxport.cli import program

if __name__ == "__main__":
    program()
