"""The daemon: one loop between sockets and workers. Started by `hicache serve`.

Doors: `build.assemble` (a configuration to tiers and workers) and `loop.Daemon` (serve until told
to stop). `operations/` answers requests, one file each; `upkeep/` is what no request waits for.
Everything runs on the loop's one thread unless a module says otherwise.
"""
