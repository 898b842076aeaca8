"""Which examples of a task are remembered: one policy per file."""

from gradmem.memory.policies.first import First
from gradmem.memory.policies.last import Last
from gradmem.memory.policies.policy import Policy, Row
from gradmem.memory.policies.reservoir import Reservoir

__all__ = ["POLICIES", "First", "Last", "Policy", "Reservoir", "Row"]

#: Every policy by its name in `EpisodicMemory(keep=…)`.
POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (Last, First, Reservoir)}
