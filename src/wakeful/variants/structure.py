"""Roles of a module's matrices by its structure, where it declares none and names do not help."""

from torch import nn

from wakeful.variants.roles import HEAD, READS, TABLE, WRITES, Role


def roles_by_structure(model: nn.Module) -> dict[int, Role]:
    """Return the roles of matrices, by `id`, whose shapes alone tell which axis lies in the
    residual stream; {} where the model has no linear layers of both kinds below.

    The stream is as wide as the embeddings, if these agree. A linear layer from this width to
    another one reads the stream; one from a larger width to it, as in feed-forward networks, writes
    to it. Left out are square matrices, which could do either, and layers from a smaller width,
    which could be the second of two low-rank factors.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if len({table.embedding_dim for table in tables}) != 1:
        return {}
    width, vocabularies = tables[0].embedding_dim, {table.num_embeddings for table in tables}
    roles: dict[int, Role] = {id(table.weight): TABLE for table in tables}
    found_roles: set[Role] = set()
    for module in model.modules():
        if not isinstance(module, nn.Linear) or id(module.weight) in roles:  # tied to a table
            continue
        role = None
        if module.in_features == width != module.out_features:
            role = HEAD if module.out_features in vocabularies else READS
        elif module.in_features > width == module.out_features:
            role = WRITES
        if role is not None:
            roles[id(module.weight)] = role
            found_roles.add(role)
    return roles if found_roles >= {READS, WRITES} else {}
