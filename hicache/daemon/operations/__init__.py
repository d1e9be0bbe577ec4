"""One file per operation of the protocol, or per close pair: what a request means and its answer.

Doors: one class a file, called from `daemon.dispatch` with a decoded request; each turns it into
events of the cache engine.
"""
