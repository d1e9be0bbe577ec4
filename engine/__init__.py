"""The cache engine (never the inference engine): which blocks, from where to where."""

if __name__ != "hicache.engine":
    raise ImportError(f"import this room as hicache.engine, not as {__name__}")
