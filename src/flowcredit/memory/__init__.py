"""What a run will need in memory, reckoned from files and settings alone: no torch, no tensor is read."""
