"""Grammars that strangers send, applied where tokens are drawn: a server uses `masks`, `worker` compiles them."""
