"""Keys of the first layer for the whole depth."""

from wakeful.routes.base import Source, ValueRoute


class SharedKeys(ValueRoute):
    """Every layer uses the first layer's keys (figs. 4, 16: worse than sharing values)."""

    examples = ("shared_keys",)

    def source(self, layer: int) -> Source:
        return Source(query=layer, key=0, value=layer)
