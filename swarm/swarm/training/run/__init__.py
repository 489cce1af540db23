"""A run as its author describes and signs it: settings, file, checks."""
