"""Helpers that turn models from elsewhere into local Hugging Face folders."""
