"""Roles of a module's matrices by its structure, where neither roles nor names tell them."""

from torch import nn

from wakeful.variants.roles import HEAD, READS, TABLE, WRITES, Role


def roles_by_structure(model: nn.Module) -> dict[int, Role]:
    """Return the roles of matrices, by `id`, whose widths alone tell the residual stream's axis.

    The stream is as wide as the embeddings, where they agree. A linear layer that takes this width
    and gives another reads the stream; one that gives it and takes more, as feed-forward layers do,
    writes to it. Square matrices could do either, and those that take less could be the second of
    two low-rank factors, so they are left out. Without layers of both kinds nothing is known.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if len({table.embedding_dim for table in tables}) != 1:
        return {}
    width, counts = tables[0].embedding_dim, {table.num_embeddings for table in tables}
    roles: dict[int, Role] = {id(table.weight): TABLE for table in tables}
    kinds: set[Role] = set()
    for module in model.modules():
        if not isinstance(module, nn.Linear) or id(module.weight) in roles:
            continue
        role = None
        if module.in_features == width != module.out_features:
            role = HEAD if module.out_features in counts else READS
        elif module.in_features > width == module.out_features:
            role = WRITES
        if role is not None:
            roles[id(module.weight)] = role
            kinds.add(role)
    return roles if kinds >= {READS, WRITES} else {}
