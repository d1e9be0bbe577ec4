"""The demo: a small LLM served with hicache and without, side by side.

Doors: `demo_run` (the two runs), `demo_model` (the model), `demo_daemon` (the daemon it starts),
`demo_report` (what it prints). Called from `hicache.commands.demo`.
"""
