"""One file per operation of the protocol, or per close pair.

Doors: the functions that `handles` (daemon/gate.py) registers; `daemon.dispatch` imports every file
here and calls them. A handler turns a request into events of the cache engine, and replies.
"""
