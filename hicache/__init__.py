"""hicache: a KV-cache storage sidecar daemon for LLM inference engines.

This module stays light: an inference engine imports `hicache.client` through it, so nothing
that a client does not need may be imported here.
"""

__version__ = "0.1.0"
