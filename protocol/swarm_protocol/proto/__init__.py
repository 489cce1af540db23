"""Wire messages: the .proto sources and what `make proto` generates from them. Nothing here is written by hand.

Code outside `swarm_protocol` sees the frozen dataclasses that mirror these messages, never the messages.
"""
