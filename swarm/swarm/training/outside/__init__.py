"""Access to a run without being a member: observers, and the author who resumes or endorses a run."""
