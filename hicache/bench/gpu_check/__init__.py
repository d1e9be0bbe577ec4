"""`hicache gpu-check`: correctness and speed of everything that needs a GPU, in a few minutes.

Doors: `run.run` (all checks) and `run.show` (their table). Each check is a module with
`run(check)`, executed in its own process: an error in CUDA ends the process in which it happens.
"""
