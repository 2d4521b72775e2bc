"""Experiments: ready-made workflows, data preparation and configurations on top of `areal_dta`."""
