"""What both ends share: messages, block keys, endpoints, CURVE keys, KV events. No sockets.

Doors: `messages` (bytes to structs and back), `keys` (namespaces and block keys), `endpoint`,
`curve`, `kv_events`. Imported by `client`, `daemon` and `connectors`.
"""
