"""Tokenizers and chat templates of strangers, in a process that can be killed, and tables for decoding."""
