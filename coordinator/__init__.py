"""The run's program: publishes, plans, admits, learns."""
