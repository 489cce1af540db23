"""The public, read-only picture of a swarm: pages for people, a JSON API for everyone, live events, a bounded history.

`collector` looks at signed records and makes `views`; `history` remembers; `api` serves the views under `/api/v1`;
`pages` draws them. A browser gets nothing that the API does not give.
"""
