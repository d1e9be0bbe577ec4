"""The demo: a small real LLM served with hicache and without, side by side."""
