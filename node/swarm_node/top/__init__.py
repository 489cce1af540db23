"""`swarm-node top`: the dashboard's views in a terminal, live.

`app` is the screen over any `dashboard.views.ViewSource`. `remote` is a source that reads a dashboard's API.
`rendering` draws views as text, which `command` also prints once if there is no terminal. Only the command imports
Textual.
"""
