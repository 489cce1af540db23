"""The schema through time, one file a revision; they run when the history is opened, in one transaction."""
