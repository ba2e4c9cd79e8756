"""A config proven before it is run: a small copy of it computes on local ranks what one rank computes."""
