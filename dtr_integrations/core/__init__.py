"""Plain data and the simulator over it. No torch, no framework."""
