"""Stories that run the real programs, in virtual time or as processes."""
