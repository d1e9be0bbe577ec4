"""The radix index: which blocks of a prompt are known, and in which tiers.

Doors: `radix` (find and insert), `node` (what a tree is made of), `snapshot` (pages for `tree`).
"""
