"""Making room for new classes in a network's last layer."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from gradmem.validation import positive_int

__all__ = ["fit_outputs", "unwidened", "widen"]


def widen(network: nn.Module, n_outputs: int) -> nn.Linear:
    """Give the network's last linear layer more outputs, in place.

    The outputs that were there stay as they are; the weights of the new ones are drawn as the layer
    draws them, by the global generator. A learner notices before its next step: the optimizer's
    state, the memory and what else belongs to the parameters follow.

    Parameters
    ----------
    network
        A linear layer, or a module whose last linear layer, in the order of `modules()`, gives the
        outputs.
    n_outputs
        As many outputs as there are to be, not fewer than now.

    Returns
    -------
    nn.Linear
        The layer.

    Examples
    --------
    >>> import torch
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> widen(network, 5)
    Linear(in_features=8, out_features=5, bias=True)
    >>> network(torch.zeros(3, 4)).shape
    torch.Size([3, 5])
    """
    layers = [part for part in network.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise ValueError(f"network must have a linear layer to widen, got {type(network).__name__}")
    layer, before = layers[-1], layers[-1].out_features
    if positive_int("n_outputs", n_outputs) < before:
        raise ValueError(f"n_outputs must be at least the {before} there are, got {n_outputs}")
    if n_outputs == before:
        return layer
    fresh = copy.deepcopy(layer).cpu()
    fresh.out_features = n_outputs
    for name, old in list(fresh.named_parameters(recurse=False)):
        shape = (n_outputs, *old.shape[1:])
        setattr(fresh, name, nn.Parameter(old.new_empty(shape), old.requires_grad))
    fresh.reset_parameters()
    for name, old in list(layer.named_parameters(recurse=False)):
        new = getattr(fresh, name).to(old.device).detach()
        new[:before] = old.detach()
        wide = nn.Parameter(new, old.requires_grad)
        wide.widened_from = weakref.ref(old)  # type: ignore[attr-defined]
        setattr(layer, name, wide)
    layer.out_features = n_outputs
    return layer


def unwidened(network: nn.Module) -> Callable[[], None]:
    """What gives the last linear layer the parameters back that it has now."""
    layer = [part for part in network.modules() if isinstance(part, nn.Linear)][-1]
    before, n_outputs = list(layer.named_parameters(recurse=False)), layer.out_features

    def undo() -> None:
        for name, parameter in before:
            setattr(layer, name, parameter)
        layer.out_features = n_outputs

    return undo


def fit_outputs(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give the last linear layer as many outputs as it has in a state that is about to be loaded.

    More or fewer; their weights are zero until then.
    """
    layers = [item for item in network.named_modules() if isinstance(item[1], nn.Linear)]
    if not layers:
        return
    name, layer = layers[-1]
    weight = state.get(f"{name}.weight" if name else "weight")
    if not isinstance(weight, Tensor) or weight.shape[1:] != layer.weight.shape[1:]:
        return  # loading it will say so
    if len(weight) == layer.out_features:
        return
    for name, old in list(layer.named_parameters(recurse=False)):
        new = nn.Parameter(old.new_zeros((len(weight), *old.shape[1:])), old.requires_grad)
        new.widened_from = weakref.ref(old)  # type: ignore[attr-defined]
        setattr(layer, name, new)
    layer.out_features = len(weight)
