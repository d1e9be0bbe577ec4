"""Benchmarks of a daemon on this machine, each beside a *floor* measured in the same run: an echo
over ZeroMQ for calls, a copy between touched buffers for blocks, raw reads and writes for disk.

Doors: `rpc`, `store`, `disk` (one `run` each), `gpu_check` (all that needs a GPU). `report` prints
rows; `daemon_process` runs the daemon that is measured. Called from `hicache.commands`.
"""
