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
    """Inside the context, call `before` and `after` around each forward pass of the modules.

    Each gets the module's key in `modules`. `before(key, args)` may return new inputs, and
    `after(key, args, output)` a new output; None keeps them. With `named`, `before` gets keyword
    arguments too: it is called as `before(key, args, kwargs)`, and returns (args, kwargs) or None.
    """

    def call(hook: Callable[..., Any], key: Key, _module: nn.Module, *arguments: Any) -> Any:
        return hook(key, *arguments)  # torch passes the module; `hook` gets its key

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
