"""Transfer: how the bytes get there, in what order, how fast, and whether they arrived."""

if __name__ != "hicache.transfer":
    raise ImportError(f"import this room as hicache.transfer, not as {__name__}")
