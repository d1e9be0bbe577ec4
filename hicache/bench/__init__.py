"""Benchmarks of a daemon against what this machine can do at best, measured in the same run.

Every row stands beside a *floor*: a bare ZeroMQ echo for calls, a copy between touched buffers for
blocks. Batches of both alternate, so that noise hits both; figures are medians.
"""
