"""Private networks: who is a member, what each may do, and a gate that answers nobody else."""
