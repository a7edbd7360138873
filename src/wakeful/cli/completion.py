"""Scripts that complete verbs, options and their values with the tab key, in three shells."""

import shlex
from collections.abc import Iterator, Mapping

from wakeful.cli.catalog import source_catalog
from wakeful.cli.help import offered, presets_of
from wakeful.config.model import VARIANTS
from wakeful.config.options import Option
from wakeful.config.tables import presets
from wakeful.config.verbs import SHORT
from wakeful.errors import WakefulError, nearest
from wakeful.plugins import verb_of

SHELLS = ("bash", "zsh", "fish")
_HELP = ("--help", "--help-all")


def script(shell: str, verbs: Mapping[str, str], kinds: Mapping[str, type]) -> str:
    """Return the script of a shell for verbs, each with its summary and the class of its options.

    It is static: the tab key starts no Python. What it cannot know, it leaves to file names.

    Raises:
        WakefulError: it is none of `SHELLS`.
    """
    if shell not in SHELLS:
        raise WakefulError(
            f"no completion for {shell!r}{nearest(shell, SHELLS)}; there are {', '.join(SHELLS)}"
        )
    lines = _fish(verbs, kinds) if shell == "fish" else _bash(verbs, kinds, shell == "zsh")
    return "\n".join(lines) + "\n"


def _bash(verbs: Mapping[str, str], kinds: Mapping[str, type], zsh: bool) -> Iterator[str]:
    if zsh:
        yield "autoload -U +X compinit && compinit"
        yield "autoload -U +X bashcompinit && bashcompinit"
    yield "_wakeful() {"
    yield '  local cur="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}" flag="" words="" place'
    yield "  for ((place = 2; place < COMP_CWORD; place++)); do"
    yield '    case "${COMP_WORDS[place]}" in -*) flag="${COMP_WORDS[place]}" ;; esac'
    yield "  done"
    two = "|".join(shlex.quote(name) for name in kinds if " " in name)
    yield '  if [ "$COMP_CWORD" -gt 2 ]; then case "$verb ${COMP_WORDS[2]}" in'
    yield f'    {two}) verb="$verb ${{COMP_WORDS[2]}}" ;;'
    yield "  esac; fi"
    yield '  if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f"    words={shlex.quote(' '.join(verbs))}"
    yield '  else case "$verb $cur" in'
    for verb, kind in kinds.items():
        flags = [flag for option in offered(kind) for flag in _flags(verb, option)]
        yield f"    {shlex.quote(f'{verb} -')}*) words={shlex.quote(' '.join([*flags, *_HELP]))} ;;"
    yield '    *) case "$verb $flag" in'
    for verb, kind in kinds.items():
        if names := _names(verb):
            yield f"      {shlex.quote(f'{verb} ')}) words={shlex.quote(' '.join(names))} ;;"
        for option in offered(kind):
            if values := _values(option):
                case, words = f"{verb} {option.flag}", " ".join(values)
                yield f"      {shlex.quote(case)}) words={shlex.quote(words)} ;;"
    yield "    esac ;;"
    yield "  esac; fi"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield "}"
    yield "complete -o default -F _wakeful wakeful"


def _fish(verbs: Mapping[str, str], kinds: Mapping[str, type]) -> Iterator[str]:
    begin = "complete --command wakeful"
    for verb, summary in verbs.items():
        told = _quoted(summary)
        yield f"{begin} -n __fish_use_subcommand --no-files -a {verb} -d {told}"
    for verb, kind in kinds.items():
        words = verb.split()
        longer = {word for name in kinds for word in name.split() if {verb} < {*name.split()}}
        seen = "; and ".join(
            [f"not __fish_seen_subcommand_from {word}" for word in sorted(longer - {verb})]
            + [f"__fish_seen_subcommand_from {word}" for word in words]
        )
        here = f'{begin} -n "{seen}"'
        if names := _names(verb):
            yield f"{here} -a {_quoted(' '.join(names))}"
        yield f"{here} -l help -d 'Show examples and the usual options.'"
        yield f"{here} -l help-all -d 'Show every option.'"
        for option in offered(kind):
            told = f"-d {_quoted(option.words)}"
            for flag in _flags(verb, option):
                line = f"{here} -l {flag.removeprefix('--')}"
                if values := _values(option):
                    line += f" -x -a {_quoted(' '.join(values))}"
                elif option.kind is not bool:
                    line += " -r"
                yield f"{line} {told}"


def _flags(verb: str, option: Option) -> list[str]:
    short = [f"--{name}" for name, target in SHORT.items() if target == option.name]
    negative = [option.negative] if option.kind is bool else []
    return [*(short if verb == "inherit" else ()), option.flag, *negative]


def _names(verb: str) -> list[str]:
    """Return the words that a verb's arguments may be, where they are known."""
    if verb in ("train", "compare"):
        return presets_of(verb)
    if other := verb_of(verb):
        return list(other.names())
    known = {"presets": presets, "completion": lambda: SHELLS,
             "data": lambda: ("prepare", "generate")}  # fmt: skip
    return list(known[verb]()) if verb in known else []


def _values(option: Option) -> list[str]:
    """Return the words that an option's value may be, where they are known."""
    place, _, name = option.name.rpartition(".")
    if place == "model" and name in VARIANTS:
        return [each.partition("(")[0] for each in source_catalog(VARIANTS[name])]
    if option.name == "scheme":
        return [each.partition("(")[0] for each in source_catalog("quant.schemes", "Scheme")]
    return [str(choice) for choice in option.choices]


def _quoted(words: str) -> str:
    """Return words in single quotes, as fish reads them."""
    escaped = words.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
