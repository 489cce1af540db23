"""A swarm's model as a frozen function of hidden states, for training one's own parameters around it."""
