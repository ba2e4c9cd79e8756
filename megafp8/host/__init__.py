"""Utilities that do not depend on training: arguments, files, processes, messages."""
