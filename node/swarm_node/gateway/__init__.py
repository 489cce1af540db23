"""The OpenAI-compatible HTTP interface of a swarm: any OpenAI client streams from it.

    swarm-node gateway --peers ADDR --port 8000

`role` is the daemon's part, `app` the routes. `admission` decides who may ask, `request_schema` and `chat_schema` what
a client may send, `answering` runs the generations, `responses` builds what goes out, `api_errors` translates failures.
"""
