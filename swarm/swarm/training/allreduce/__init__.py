"""The reduction of one vector among the members of a signed group: the data plane of a round."""
