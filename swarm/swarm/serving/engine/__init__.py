"""Runs the steps of all sessions of one server: schedules them, and allocates the cache."""
