"""Grades files: `python -m reward.check` with every kind of reward, `python -m reward.check.convert` to write a problem set."""
