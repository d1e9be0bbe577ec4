"""Which blocks were stored in which tier and which were removed, for subscribers with a copy.

Door: `diff.Changes`, read by the daemon's KV-event publisher.
"""
