"""The live page of a run: `model` folds records into a view, `server` serves it, `static/` draws it."""

from launcher.dashboard.server import Dashboard, DashboardError, serve

__all__ = ["Dashboard", "DashboardError", "serve"]
