"""The users' own reward functions, which run in processes of their own."""
