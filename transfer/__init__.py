"""Transfer: copies blocks between tiers, in which order, how fast, and with what outcome.

Doors: `mover.Mover` (used by the daemon's loop), `worker_events` (what it returns), `worker` (the
process per device). `media` has a file per medium, `gpu_pages` the pages of inference engines.
"""

if __name__ != "hicache.transfer":
    raise ImportError(f"import this room as hicache.transfer, not as {__name__}")
