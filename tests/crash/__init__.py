"""The crash tests' harness: kills runs at every point of the commit protocol, cuts their power, and lets them go on."""
