"""Is the most local head local, or does it look at nothing but its own patch?"""
