"""Which examples of a task are remembered: one policy per file."""

from gradmem.memory.policies.balanced import Balanced
from gradmem.memory.policies.first import First
from gradmem.memory.policies.herding import Herding
from gradmem.memory.policies.k_centre import KCentre
from gradmem.memory.policies.last import Last
from gradmem.memory.policies.loss import LossWeighted
from gradmem.memory.policies.offer import Features, Gradients, Losses, Offer
from gradmem.memory.policies.policy import Policy, Row
from gradmem.memory.policies.reservoir import Reservoir

__all__ = [
    "POLICIES",
    "Balanced",
    "Features",
    "First",
    "Gradients",
    "Herding",
    "KCentre",
    "Last",
    "LossWeighted",
    "Losses",
    "Offer",
    "Policy",
    "Reservoir",
    "Row",
]

#: Every policy by its name in `EpisodicMemory(keep=…)`.
POLICIES: dict[str, type[Policy]] = {
    kind.name: kind for kind in (Last, First, Reservoir, Balanced, Herding, KCentre, LossWeighted)
}
