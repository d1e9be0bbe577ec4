"""What connectors share: paged KV, loads layer by layer, staging memory, a model's arithmetic.

Imported by connectors only.
"""
