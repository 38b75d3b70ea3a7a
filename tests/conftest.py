"""What holds for every test: property tests draw the same examples each time, and have no clock."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
