"""A run's data as numbered samples: which tokens sample 4711 is, the same on every replica.

`corpus.load_corpus` is the entry point. A source (`source`, `document_files`, `hub`) yields documents in
passages, a worker process writes them as tokens to a file (`tokenizing`, `token_file`), and a `Corpus` cuts these into
windows.
"""
