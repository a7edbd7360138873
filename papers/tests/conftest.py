"""The start of the papers' tests, which is that of the core's."""

pytest_plugins = ["suite"]
