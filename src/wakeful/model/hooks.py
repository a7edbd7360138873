"""Functions called before and after a model's modules run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import nn

Key = TypeVar("Key")


@contextmanager
def hooked(
    modules: Mapping[Key, nn.Module],
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[[Key, tuple[Any, ...], Any], Any] | None = None,
    named: bool = False,
) -> Iterator[None]:
    """Call `before(key, args)` before each module's forward pass and `after(key, args, output)`
    after it. A result that is not None replaces the inputs or the output.

    With `named` it is `before(key, args, kwargs)`, whose result replaces both.
    """

    def call(look: Callable[..., Any], key: Key, _module: nn.Module, *arguments: Any) -> Any:
        return look(key, *arguments)

    with ExitStack() as hooks:
        for key, module in modules.items():
            if before is not None:
                look = partial(call, before, key)
                hook = module.register_forward_pre_hook(look, with_kwargs=named)
                hooks.callback(hook.remove)
            if after is not None:
                hook = module.register_forward_hook(partial(call, after, key))
                hooks.callback(hook.remove)
        yield
