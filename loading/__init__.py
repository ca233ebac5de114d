"""Corpus files and query logs: from what teams have to what the contracts ask for."""
