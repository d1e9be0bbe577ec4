"""One file per medium that blocks are copied to and from. Imported by the device's worker only.

Doors: `medium.Link` (what a medium implements), `host`, `disk`, `cuda`.
"""
