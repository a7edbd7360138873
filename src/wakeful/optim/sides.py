"""Which side of which weight is rotated: an ordered table of rules on names, checked by widths.

Every matrix must be matched by a rule, every rule not marked optional must match a parameter, and
all rotated axes must have one width, the residual stream's D. Scalars and 1-D parameters are never
rotated (METHODS section 3).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wakeful.errors import WakefulError


@dataclass(frozen=True)
class Rule:
    """One line of a table: parameters whose name ends in ``pattern`` are rotated along ``axis``.

    ``pattern`` is a regular expression for the end of a dotted name, from a dot (or the start) on.
    ``axis`` is the residual-width axis of the matrix as stored, 0 or 1; None keeps the identity.
    ``vocabulary`` says that the other axis counts tokens or positions and is never rotated.
    ``optional`` says that the rule may match nothing; another rule that matches nothing raises.
    """

    pattern: str
    axis: int | None
    vocabulary: bool = False
    optional: bool = False

    def matches(self, name: str) -> bool:
        return re.fullmatch(rf"(?:.*\.)?(?:{self.pattern})", name) is not None


WAKEFUL_RULES = (
    Rule(r"embed\.weight", 1, vocabulary=True),
    Rule(r"positions\.weight", 1, vocabulary=True, optional=True),
    Rule(r"blocks\.\d+\.attention\.(query|key|value)(\.[qkv]_proj)?\.weight", 1),
    Rule(r"blocks\.\d+\.attention\.out(\.o_proj)?\.weight", 0),
    Rule(r"blocks\.\d+\.mlp\.(gate|up)(\.(gate|up)_proj)?\.weight", 1),
    Rule(r"blocks\.\d+\.mlp\.down(\.down_proj)?\.weight", 0),
    Rule(r"route\.(.*\.)?gates\.\d+\.weight", 1, optional=True),
    Rule(r"(route|depth)\.(.*\.)?weights(\.\w+)?", None, optional=True),  # mixing coefficients
    Rule(r"(lm_)?head\.weight", 1, vocabulary=True, optional=True),
)
"""``wakeful`` models, by themselves or as Transformers': linear weights are (out, in)."""

LLAMA_RULES = (
    Rule(r"embed_tokens\.weight", 1, vocabulary=True),
    Rule(r"layers\.\d+\.self_attn\.[qkv]_proj\.weight", 1),
    Rule(r"layers\.\d+\.self_attn\.o_proj\.weight", 0),
    Rule(r"layers\.\d+\.mlp\.(gate|up)_proj\.weight", 1),
    Rule(r"layers\.\d+\.mlp\.down_proj\.weight", 0),
    Rule(r"lm_head\.weight", 1, vocabulary=True, optional=True),
)
"""Llama, Mistral, Qwen, SmolLM and others with their names in Hugging Face: (out, in)."""

GPT2_RULES = (
    Rule(r"wte\.weight", 1, vocabulary=True),
    Rule(r"wpe\.weight", 1, vocabulary=True),
    Rule(r"h\.\d+\.attn\.c_attn\.weight", 0),
    Rule(r"h\.\d+\.attn\.c_proj\.weight", 1),
    Rule(r"h\.\d+\.mlp\.c_fc\.weight", 0),
    Rule(r"h\.\d+\.mlp\.c_proj\.weight", 1),
    Rule(r"lm_head\.weight", 1, vocabulary=True, optional=True),
)
"""GPT-2 in Hugging Face, whose ``Conv1D`` weights are stored (in, out)."""

TABLES = {"wakeful": WAKEFUL_RULES, "llama": LLAMA_RULES, "gpt2": GPT2_RULES}


def plain_name(name: str) -> str:
    """The name without what data parallelism, compilation and checkpointing put into it, so that
    a wrapped model keeps its rotations."""
    wrappers = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in wrappers)


def choose_table(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Rule, ...]:
    """The first table of ``TABLES`` that fits these names and shapes without an error.

    Raises a WakefulError with the objection of the table that matches most matrices.
    """
    objections: list[tuple[int, str, str]] = []
    for family, rules in TABLES.items():
        try:
            find_sides(shapes, rules)
        except WakefulError as error:
            matched = sum(any(rule.matches(name) for rule in rules) for name in shapes)
            objections.append((matched, family, str(error)))
        else:
            return rules
    _, family, objection = max(objections, key=lambda o: o[0])
    raise WakefulError(
        f"no table of rotation rules ({', '.join(TABLES)}) fits these parameters; "
        f"the nearest, {family}, says: {objection}; pass rules=(Rule(...), ...)"
    )


def find_sides(
    shapes: Mapping[str, tuple[int, ...]],
    rules: Iterable[Rule],
    *,
    both: bool = False,
    all_rules_match: bool = True,
) -> dict[str, tuple[int, ...]]:
    """The rotated axes of each parameter, the residual axis first; () keeps the identity.

    ``shapes`` maps parameter names to shapes. With ``both`` the other axis of a matrix is rotated
    too, unless its rule says it is a vocabulary. The first rule that matches a name decides.
    Raises a WakefulError for a matrix no rule matches, a rule that matches nothing (unless
    ``all_rules_match`` is False), a rotated tensor that is no matrix, or widths that differ.
    """
    rules = tuple(rules)
    unused = {rule: None for rule in rules if not rule.optional and all_rules_match}
    sides: dict[str, tuple[int, ...]] = {}
    first: tuple[str, int] | None = None
    for name, shape in shapes.items():
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is not None:
            unused.pop(rule, None)
        if len(shape) < 2 or (rule is not None and rule.axis is None):
            sides[name] = ()
            continue
        if rule is None:
            raise WakefulError(
                f"no rotation rule matches {name} of shape {tuple(shape)}; "
                "add a Rule for it, with axis=None to leave it as it is"
            )
        if len(shape) != 2 or rule.axis not in {0, 1}:
            raise WakefulError(
                f"rule {rule.pattern!r} rotates axis {rule.axis} of {name}, whose shape is "
                f"{tuple(shape)}: only matrices are rotated, along axis 0 or 1"
            )
        width = shape[rule.axis]
        first = first or (name, width)
        if width != first[1]:
            raise WakefulError(
                f"axis {rule.axis} of {name} is {width} wide but {first[0]} has residual width "
                f"{first[1]}: the rotation rules take the wrong side of one of them"
            )
        other = (1 - rule.axis,) if both and not rule.vocabulary else ()
        sides[name] = (rule.axis, *other)
    if unused:
        patterns = ", ".join(repr(rule.pattern) for rule in unused)
        raise WakefulError(f"these rotation rules match no parameter: {patterns}")
    return sides
