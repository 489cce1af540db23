"""Runs the steps of all sessions of one server: what comes next, and who gets cache room."""
