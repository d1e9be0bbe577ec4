"""What both ends of the wire share: messages, keys, endpoints, CURVE keys, KV events.

Imported by `client`, `daemon` and `connectors`. Bytes to structs and back; no sockets, no waiting.
"""
