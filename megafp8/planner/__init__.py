"""Memory and stages of a run, from its config alone: pure functions of the config and the layout."""
