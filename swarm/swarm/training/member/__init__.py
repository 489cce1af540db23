"""One member of a run from joining to leaving: the tasks around rounds and intervals, and what they report."""
