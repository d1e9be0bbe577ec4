"""One file per thing that is asked of the cache engine: match, fetch, put, warm, pin, clear.

Called by `engine.core`, which hands each event to its file.
"""
