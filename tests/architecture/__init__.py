"""The rules of the project that a tool or a test can check: layers, sizes, names, dead code."""
