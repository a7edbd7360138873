"""The verb export: what its options call."""

from wakeful.cli.console import tell
from wakeful.cli.parsing import leading, parse
from wakeful.config.verbs import ExportOptions
from wakeful.errors import WakefulError


def run(arguments: list[str]) -> None:
    """RUN DIR [options]: write a model for Hugging Face Transformers."""
    paths, rest = leading(arguments)
    options = parse(ExportOptions, rest, "export RUN DIR")
    if len(paths) != 2:
        raise WakefulError("name a model to export and a folder to write: wakeful export RUN DIR")

    from wakeful.verbs.export import export

    kind = export(paths[0], paths[1], options=options)
    own = ", trust_remote_code=True" if kind == "wakeful" else ""
    tell(f'{kind}: AutoModelForCausalLM.from_pretrained("{paths[1]}"{own})')
