"""Placement and actor groups: inline or Ray."""
