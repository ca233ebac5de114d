"""Where artifacts live, and why they can be trusted."""
