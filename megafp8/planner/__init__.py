"""Memory, step time, stages and goodput of a run, predicted from its config alone, and the search for a layout."""
