"""Both ends of a model in the client's own process: what stands before and after the blocks that servers run."""
