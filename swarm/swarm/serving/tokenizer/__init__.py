"""Tokenizers and chat templates of strangers, in a process that can be killed: `process` runs it, `worker` is it."""
