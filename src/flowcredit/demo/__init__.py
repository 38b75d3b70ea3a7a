"""A run to be looked at in a browser: base and aligned side by side, and the rollout tree of one prompt.

``command.demo_command`` is the way in; gradio is imported by ``page.py`` alone.
"""
