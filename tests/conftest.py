"""The start of the core's tests."""

pytest_plugins = ["suite"]
