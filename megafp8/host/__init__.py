"""Chores that know nothing of training: arguments, files, processes, messages."""
