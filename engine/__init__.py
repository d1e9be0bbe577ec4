"""The cache engine (never the inference engine): which blocks are copied or evicted, and when.

Pure: no clock, no I/O, no threads. Doors: `core.CacheEngine` (an event in, a `Plan` out), `plan`
(the events, moves and outcomes), `settings`.
"""

if __name__ != "hicache.engine":
    raise ImportError(f"import this room as hicache.engine, not as {__name__}")
