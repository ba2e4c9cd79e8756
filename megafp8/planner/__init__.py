"""What a config will need, before it runs: pure functions of the config and the layout."""
