"""Rollout: the embedded inference server, the router before the servers, the worker that runs episodes."""
