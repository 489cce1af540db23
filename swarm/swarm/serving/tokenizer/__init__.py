"""Tokenizers and chat templates of strangers: the process that can be killed, and tables to decode with."""
