"""Eviction policies: which leaf of a tier to give up first. One small file each."""
