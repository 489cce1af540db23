"""The OpenAI-compatible HTTP face of a swarm: any OpenAI client streams from it, over machines that come and go.

    swarm-node gateway --peers ADDR --port 8000

`command` is the typer command, `app` the routes, `schema` and `shapes` what goes in and out, `streaming` the
server-sent events and what a client's disconnect does, `errors` how failures look to a client.
"""
