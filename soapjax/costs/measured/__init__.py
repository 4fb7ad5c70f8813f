"""Profiles: what was measured on devices and links, how it is fitted, and how it replaces analytic costs."""
