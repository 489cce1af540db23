"""Looks at a run without being a member of it: observers, and the author who resumes or endorses a run."""
