"""One file per medium that blocks are copied to and from, each behind `medium.Link`.

Imported by the worker process of that device only.
"""
