"""Nouns: what crosses a stage border, and what can go wrong."""
