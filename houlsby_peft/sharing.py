"""Which place owns the bottleneck that it and others use.

Houlsby et al. 2019 give each place a bottleneck of its own. Mohebbi and Rajaei 2020 share one among the places of a
layer, or of three consecutive layers ("3-shared"). Shared or not, a bottleneck is registered in the module tree once,
at the first place that uses it: saved files, parameter counts and optimizers see it once.
"""

from __future__ import annotations

from collections.abc import Mapping

from .places import Place


def find_owners(places: Mapping[str, Place], widths: Mapping[str, int], share_layers: int) -> dict[str, str]:
    """The owner of the bottleneck of each place.

    Args:
        places: bottleneck places by module name, in the model's order.
        widths: the width of each place; places of unlike width cannot share.
        share_layers: 0: every place owns its bottleneck. k: one for all places in k consecutive layers of a stack,
            counted from the stack's layer 0, whichever of these layers are adapted. Stacks (the encoder, the decoder)
            never share with each other; modules outside any list of layers count as one layer.

    Returns:
        From each place's name to its owner's name; an owner maps to itself.
    """
    first_of_group: dict[tuple[str, int, int], str] = {}
    owners = {}
    for key, place in places.items():
        if share_layers == 0:
            owners[key] = key
        else:
            group = (place.stack, (place.layer or 0) // share_layers, widths[key])
            owners[key] = first_of_group.setdefault(group, key)
    return owners
