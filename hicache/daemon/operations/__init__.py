"""One file per operation of the protocol, or per close pair: what a request means and its answer.

Called from `daemon.dispatch` with a decoded request; each turns it into events of the cache engine.
"""
