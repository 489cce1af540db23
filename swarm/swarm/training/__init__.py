"""Training a run together: `member` owns tasks, `inner` trains, `round` agrees, `allreduce` averages, `state` keeps."""
