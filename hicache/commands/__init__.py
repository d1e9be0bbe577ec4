"""The commands of `hicache`, one file each, imported only when its command runs.

Doors: in each file the click command with the file's name; `hicache.cli` has the table. Shared:
`curve_option`, `time_options` (options), `text_format`, `tree_drawing`, `index_tree`, `disk_tools`.
"""
