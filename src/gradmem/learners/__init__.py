"""The learners of the paper, one file each, behind one contract (`Learner`)."""

from gradmem.learners.agem import AGEM
from gradmem.learners.boundaries import Every, InferredTask
from gradmem.learners.derpp import DERpp
from gradmem.learners.er import ER
from gradmem.learners.ewc import EWC
from gradmem.learners.gem import GEM
from gradmem.learners.icarl import ICaRL
from gradmem.learners.independent import Independent
from gradmem.learners.lamaml import LaMAML
from gradmem.learners.learner import Learner
from gradmem.learners.mega import MEGA
from gradmem.learners.mer import MER
from gradmem.learners.multimodal import Multimodal
from gradmem.learners.rising_loss import RisingLoss
from gradmem.learners.single import Single
from gradmem.learners.softgem import SoftGEM
from gradmem.learners.steadygem import SteadyGEM

__all__ = [
    "AGEM",
    "ER",
    "EWC",
    "GEM",
    "LEARNERS",
    "MEGA",
    "MER",
    "DERpp",
    "Every",
    "ICaRL",
    "Independent",
    "InferredTask",
    "LaMAML",
    "Learner",
    "Multimodal",
    "RisingLoss",
    "Single",
    "SoftGEM",
    "SteadyGEM",
]

#: Every learner by the name it has on the command line and in results: the paper's in its order,
#: then others. Whatever stands here is covered by the checks in `gradmem.checks`.
LEARNERS: dict[str, type[Learner]] = {
    "single": Single,
    "independent": Independent,
    "multimodal": Multimodal,
    "ewc": EWC,
    "icarl": ICaRL,
    "gem": GEM,
    "agem": AGEM,
    "er": ER,
    "derpp": DERpp,
    "mega": MEGA,
    "mer": MER,
    "lamaml": LaMAML,
    "softgem": SoftGEM,
    "steadygem": SteadyGEM,
}
