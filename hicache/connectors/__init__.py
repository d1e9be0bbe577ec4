"""One file per inference engine: that engine's words ↔ ours. Deleting one breaks no other file."""
