"""Context parallelism: sequences so long that each is cut over ranks, and attention across the cut."""
