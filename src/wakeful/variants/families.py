"""Names of weights in families of models: which axis of each lies in the residual stream.

The table has names and axes only, so that nothing here needs Transformers. It is used only for
models whose modules declare no roles (`wakeful.variants.roles`).
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from wakeful.variants.roles import HEAD, READS, TABLE, WRITES, Role


@dataclass(frozen=True, kw_only=True)
class MatrixPatterns:
    """The names of one family's matrices; each field is a regular expression.

    A family of Transformers, or the models of another framework: torchtitan, litgpt, Megatron-LM,
    OLMo-core and nanoGPT.

    `layer` begins the names of a layer, after the stack it is in; `reads` and `writes` go on with
    the matrices that read the residual stream and that write to it. Outside of layers, `tables`
    are embeddings of tokens and positions, and `heads` give logits.
    """

    name: str
    layer: str = r"layers\.\d+"
    reads: str
    writes: str
    tables: str = r"(?!)"
    heads: str = r"lm_head"
    transposed: bool = False
    """True if layers store their matrices as (in, out), like `Conv1D`, not (out, in)."""

    def match_in_layer(self, name: str) -> tuple[str, Role] | None:
        """Return (stack, role) of a matrix inside a layer, by the matrix's full name; None if the
        name does not fit the family's patterns.

        The stack is what the name has before `layer`: "model." of
        "model.layers.0.self_attn.q_proj.weight".
        """
        for pattern, role in ((self.reads, READS), (self.writes, WRITES)):
            # Names may end in "weight0" and so on, for experts' matrices.
            match = re.fullmatch(rf"((?:.*\.)?){self.layer}\.(?:{pattern})[._]weight\d*", name)
            if match is not None:
                assert role.residual is not None
                # The role's axis is that of an (out, in) matrix; a transposed one is (in, out).
                axis = 1 - role.residual if self.transposed else role.residual
                return match[1], dataclasses.replace(role, residual=axis)
        return None

    def match_outside(self, name: str) -> Role | None:
        """Return the role of a matrix outside of layers, an embedding or a head, by its full name;
        None if the name does not fit the family's patterns.
        """
        for pattern, role in ((self.tables, TABLE), (self.heads, HEAD)):
            if re.fullmatch(rf"(?:.*\.)?(?:{pattern})\.weight", name):
                return role
        return None


_GPT2 = MatrixPatterns(
    name="gpt2",
    layer=r"h\.\d+",
    reads=r"attn\.c_attn|mlp\.c_fc",
    writes=r"attn\.c_proj|mlp\.c_proj",
    tables=r"wte|wpe",
    transposed=True,
)

FAMILIES = (
    # Mistral, Qwen, Gemma, SmolLM, OLMo, Phi-3, StableLM, Starcoder2, Mixtral's attention
    MatrixPatterns(
        name="llama",
        reads=r"self_attn\.(?:q|k|v|qkv)_proj|mlp\.(?:(?:gate|up|gate_up)_proj|c_fc)",
        writes=r"self_attn\.o_proj|mlp\.(?:down_proj|c_proj)",
        tables=r"embed_tokens",
    ),
    MatrixPatterns(
        name="phi",
        reads=r"self_attn\.[qkv]_proj|mlp\.fc1",
        writes=r"self_attn\.dense|mlp\.fc2",
        tables=r"embed_tokens",
    ),
    MatrixPatterns(
        name="opt",
        reads=r"self_attn\.[qkv]_proj|fc1",
        writes=r"self_attn\.out_proj|fc2",
        tables=r"embed_tokens|embed_positions",
    ),
    _GPT2,
    dataclasses.replace(_GPT2, name="nanogpt", transposed=False),
    MatrixPatterns(
        name="gptj",
        layer=r"h\.\d+",
        reads=r"attn\.[qkv]_proj|mlp\.fc_in",
        writes=r"attn\.out_proj|mlp\.fc_out",
        tables=r"wte",
    ),
    MatrixPatterns(  # Pythia
        name="gpt_neox",
        reads=r"attention\.query_key_value|mlp\.dense_h_to_4h",
        writes=r"attention\.dense|mlp\.dense_4h_to_h",
        tables=r"embed_in",
        heads=r"lm_head|embed_out",
    ),
    MatrixPatterns(  # Falcon
        name="bloom",
        layer=r"h\.\d+",
        reads=r"self_attention\.query_key_value|mlp\.dense_h_to_4h",
        writes=r"self_attention\.dense|mlp\.dense_4h_to_h",
        tables=r"word_embeddings",
    ),
    MatrixPatterns(  # also Llama's own code
        name="torchtitan",
        reads=r"attention\.(?:qkv_linear\.)?w(?:q|k|v|qkv|q_a|kv_a)"
        r"|(?:feed_forward|moe\.shared_experts)\.w[13]|moe\.router\.gate",
        writes=r"attention\.wo|(?:feed_forward|moe\.shared_experts)\.w2",
        tables=r"tok_embeddings",
        heads=r"lm_head|output",
    ),
    MatrixPatterns(
        name="litgpt",
        layer=r"h\.\d+",
        reads=r"attn\.(?:qkv|attn|q_a_proj|kv_a_proj_with_mqa)"
        r"|mlp\.(?:(?:experts\.\d+\.|shared_experts\.)?fc(?:_[12])?|gate)",
        writes=r"attn\.proj|mlp\.(?:experts\.\d+\.|shared_experts\.)?proj",
        tables=r"wte",
    ),
    MatrixPatterns(  # experts in one tensor are numbered weights: linear_fc1.weight0
        name="megatron",
        reads=r"(?:self|cross)_attention\.linear_(?:qkv|q|kv|q_proj|(?:q|kv|qkv)_down_proj)"
        r"|mlp\.(?:(?:experts\.(?:local_experts\.\d+\.)?|shared_experts\.)?linear_fc1|router)",
        writes=r"(?:self|cross)_attention\.linear_proj"
        r"|mlp\.(?:experts\.(?:local_experts\.\d+\.)?|shared_experts\.)?linear_fc2",
        tables=r"(?:word|position|tokentype)_embeddings",
        heads=r"output_layer",
    ),
    MatrixPatterns(
        name="olmo_core",
        layer=r"blocks\.\d+",
        reads=r"attention\.w_(?:q|k|v|g|qkv)|(?:feed_forward|feed_forward_moe\.shared_mlp)\.w[13]",
        writes=r"attention\.w_out|(?:feed_forward|feed_forward_moe\.shared_mlp)\.w2",
        tables=r"embeddings",
        heads=r"lm_head\.w_out",
    ),
)


def roles_by_name(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, Role]]:
    """Return (family's name, role) of every matrix that fits a family, by the matrix's name.

    `shapes` are the shapes of a model's tensors by their names. A model may have several stacks of
    layers. For each stack the family is chosen whose patterns fit the most matrices, among the
    families by which the residual stream is equally wide in all of these matrices: this excludes
    names that fit by accident, and matrices that are stored transposed. Embeddings and heads are
    then found by the patterns of the chosen families.
    """
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    # For each stack of layers: the best family so far, and the roles that it gives.
    best: dict[str, tuple[MatrixPatterns, dict[str, Role]]] = {}
    for family in FAMILIES:
        stacks: dict[str, dict[str, Role]] = {}
        for name in matrices:
            match = family.match_in_layer(name)
            if match is not None:
                stacks.setdefault(match[0], {})[name] = match[1]
        for stack, roles in stacks.items():
            # The residual stream's width by each matrix: its size along the role's axis, 0 or 1.
            widths = {matrices[name][role.residual or 0] for name, role in roles.items()}
            best_count = len(best[stack][1]) if stack in best else 0
            if len(widths) == 1 and len(roles) > best_count:
                best[stack] = (family, roles)
    result: dict[str, tuple[str, Role]] = {}
    for family, roles in best.values():
        result |= {name: (family.name, role) for name, role in roles.items()}
    for family, _ in best.values():
        for name in matrices.keys() - result.keys():
            role = family.match_outside(name)
            if role is not None:
                result[name] = (family.name, role)
    return result


_PLAIN = dataclasses.replace(
    _GPT2, name="", tables=r"embed|embedding|embeddings|positions", heads=r"head"
)


def role_outside_layers(name: str) -> Role | None:
    """Return the role of an embedding or a head, by a full name that fits any family; None for a
    name that fits none.
    """
    for family in (*FAMILIES, _PLAIN):  # the last has plain names, such as "embedding"
        role = family.match_outside(name)
        if role is not None:
            return role
    return None
