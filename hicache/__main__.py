"""`python -m hicache` is the same as `hicache`."""

from hicache.cli import main

if __name__ == "__main__":
    main()
