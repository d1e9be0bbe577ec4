"""One package per inference engine: it translates that engine's interface to the client's.

Doors: `transformers`, `vllm`. They share `common` and do not import each other; deleting one breaks
no other file.
"""
