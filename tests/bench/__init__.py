"""Developers' benchmarks: `python -m tests.bench NAME`, or `make bench-NAME`."""
