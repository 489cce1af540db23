"""The OpenAI-compatible HTTP interface of a swarm. Any OpenAI client can stream answers from it.

    swarm-node gateway --peers ADDR --port 8000

`role` runs the gateway in a daemon and `app` defines the routes. `admission` decides who may ask. `request_schema` and
`chat_schema` define the request bodies. `answering` runs the generations, `responses` builds the response objects, and
`api_errors` translates failures.
"""
