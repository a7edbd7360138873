"""Queries of the first layer for the whole depth."""

from wakeful.routes.base import Source, ValueRoute


class SharedQueries(ValueRoute):
    """Every layer uses the first layer's queries (fig. 16: worse than sharing values)."""

    examples = ("shared_queries",)

    def source(self, layer: int) -> Source:
        return Source(query=0, key=layer, value=layer)
