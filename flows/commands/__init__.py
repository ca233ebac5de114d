"""The commands of `dartflow`, a file for each kind; `flows.cli` puts them together."""
