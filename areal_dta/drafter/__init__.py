"""Speculative decoding: draft trees, drafters, the tuner that picks among them, and their training on idle servers."""
