"""Starts, watches and stops the processes of a run, and shows what they say. Loads neither torch nor AReaL."""
