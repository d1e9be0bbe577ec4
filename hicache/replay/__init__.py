"""Replaying recorded requests through the cache engine, to prove policies and to size tiers."""
