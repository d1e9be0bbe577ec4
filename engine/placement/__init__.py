"""Which copy goes where when room is short: eviction, write-back, promotion, slabs.

Called by `engine.core` and `engine.requests`. Doors: `evictor.Evictor`, `write_back.WriteBack`.
"""
