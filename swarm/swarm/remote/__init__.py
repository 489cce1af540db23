"""A swarm's model as a frozen function of hidden states, for training something of one's own around it."""
