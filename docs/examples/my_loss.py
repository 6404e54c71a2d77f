"""A loss of your own: DPPO's binary total-variation mask (arXiv 2602.04879).

A ratio says little about how far a rare token's probability has moved. DPPO looks at the probability itself: a token has no
gradient once |p_current - p_behaviour| exceeds a threshold and the update would move it further away.
"""

from torch import Tensor

from conf.schema import AlgoConfig
from trainer.learn.losses import LossInputs

THRESHOLD = 0.1


def dppo(current: Tensor, inputs: LossInputs, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    moved = (current.exp() - inputs.behaviour.exp()).detach()
    outside = (moved.abs() > THRESHOLD) & (moved * inputs.advantages > 0)
    ratios = (current - inputs.behaviour).clamp(-20, 20).exp()
    losses = -ratios * inputs.advantages * ~outside
    return losses, {"masked_fraction": outside.float(), "probability_moved": moved.abs()}
