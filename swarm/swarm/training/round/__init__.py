"""One outer step: how members form a group, agree on its result, and prove that the step was committed."""
