"""A page that shows a run while it goes, down to the token: `python -m launch.view outputs/NAME`."""
