"""`python -m mlfabric`: the command, where its script is not on the path."""

from mlfabric.cli import main

if __name__ == "__main__":
    main()
