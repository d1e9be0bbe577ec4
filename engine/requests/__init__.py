"""The cache engine's requests, one file each: match, fetch, put, warm, pin, clear, hints, restore.

Doors: one class a file, called by `engine.core`, which passes each event to its file.
"""
