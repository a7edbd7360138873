"""An extension of griffe, which reads the reference: functions that a stub declares by overloads.

griffe keeps the overloads of a function only beside its implementation, which stubs never have.
"""

from typing import Any

import griffe


class Overloads(griffe.Extension):
    """Declare the last overload as the function itself, which every call may use."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Add a function for each name that has overloads and no definition."""
        for name, overloads in mod.overloads.items():
            if overloads and name not in mod.members:
                mod.set_member(name, overloads[-1])
