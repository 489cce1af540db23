"""Training a run together: `member` owns the tasks, `inner` trains, `round` agrees, `allreduce` averages, `state` keeps."""
