"""`agentrl view`: a local web page of runs, steps and trajectories, and the same in a terminal."""
