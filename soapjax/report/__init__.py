"""Plain data in, text out."""
