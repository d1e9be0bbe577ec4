"""What connectors share. Imported by connectors only.

Doors: `paged_blocks` (blocks in an inference engine's pages), `page_load` (loads layer by layer),
`page_sharing` (registration with the daemon), `staging` (pinned memory), `model_config` and
`prefill_arithmetic` (a model's shape and FLOP).
"""
