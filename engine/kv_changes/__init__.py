"""Which blocks came to be held where and which are gone, for a subscriber that keeps a copy.

Door: `diff.Changes`, read by the daemon's KV-event publisher.
"""
