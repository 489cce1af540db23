"""`swarm-node top`: the dashboard's picture in a terminal, live.

`screen` shows any `dashboard.source.Source`; `remote` is one that reads a dashboard's API; `pictures` and `block_map`
draw the views as text, which `once` prints for whoever has no terminal. Textual is imported by the command alone.
"""
