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
    """Call hooks around each module's forward pass, inside the context. `key` is the module's.

    `before(key, args)` may return new inputs, `after(key, args, output)` a new output, or None to
    keep them. With `named` the first is `before(key, args, kwargs)`, and returns both.
    """

    def call(hook: Callable[..., Any], key: Key, _module: nn.Module, *arguments: Any) -> Any:
        return hook(key, *arguments)

    with ExitStack() as hooks:
        for key, module in modules.items():
            if before is not None:
                call_before = partial(call, before, key)
                hook = module.register_forward_pre_hook(call_before, with_kwargs=named)
                hooks.callback(hook.remove)
            if after is not None:
                hook = module.register_forward_hook(partial(call, after, key))
                hooks.callback(hook.remove)
        yield
