"""What end-to-end training minimises: one forward of the student on its own stream, and one of a teacher if need be.

The teacher is the source. Layers before the first converted one are the same in both as long as nothing in them trains:
then they run once, in the teacher, without gradients, and the student starts from what they gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridize.errors import UsageError
from hybridize.hybrid.walk import passing_on
from hybridize.priming.batches import Batch
from hybridize.priming.losses import TokenSums, predicted, vocabulary_loss


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses per predicted token, all in one sum.

    cross_entropy: next-token loss; kl: KL(source || hybrid) of the logits at `temperature`; hidden: squared error of
    what leaves the final norm, relative to the source's own square.
    """

    cross_entropy: float = 0.0
    kl: float = 0.0
    hidden: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        values = (self.cross_entropy, self.kl, self.hidden)
        if min(values) < 0 or not 0 < sum(values) < float("inf"):
            raise UsageError(f"Loss weights are {values}; give finite ones, none below 0 and one above it.")
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"The temperature of the KL is {self.temperature}; it must be above 0.")

    @property
    def needs_teacher(self) -> bool:
        return self.kl > 0 or self.hidden > 0


class Objective(nn.Module):
    """The loss of one batch, as one module, so that sharding can treat student and loss as one forward."""

    def __init__(self, student: Any, weights: LossWeights, teacher: Any = None):
        super().__init__()
        self.student, self.weights = student, weights
        # In a list, so that the teacher is no part of this module: it is neither trained nor sharded nor saved.
        self._teacher = [teacher] if weights.needs_teacher else []
        self.shared_layers = _shared_layers(student, teacher) if self._teacher else 0

    def forward(self, batch: Batch, score: bool = False) -> dict[str, Tensor]:
        """Sums over the batch's predicted tokens: `loss`, which has gradients, and its unweighted parts.

        score: the loss is the student's next-token loss alone, whatever it trains for.
        """
        given, entering = self._teach(batch) if self._teacher and not score else (None, None)
        with passing_on(self.student.base_model, 0 if score else self.shared_layers):
            inputs = {"input_ids": batch.ids} if entering is None else {"inputs_embeds": entering}
            out = self.student.base_model(**inputs, position_ids=batch.positions, use_cache=False)
        hidden = predicted(out.last_hidden_state, batch.targets)
        w = LossWeights(cross_entropy=1.0) if score else self.weights
        sums = TokenSums(*hidden.new_zeros(3, dtype=torch.float32))
        if w.cross_entropy or w.kl:
            wanted = batch.ids[:, 1:][batch.targets[:, 1:]]
            teacher = self._teacher[0] if self._teacher else None
            sums = vocabulary_loss(
                self.student,
                hidden,
                wanted,
                teacher,
                given,
                cross_entropy=w.cross_entropy,
                kl=w.kl,
                temperature=w.temperature,
            )
        parts = {"loss": sums.loss}
        if w.cross_entropy:
            parts["cross_entropy"] = sums.cross_entropy
        if w.kl:
            parts["kl"] = sums.kl
        if w.hidden and given is not None:
            error = relative_error(hidden, given)
            parts["hidden"] = error.detach()
            parts["loss"] = parts["loss"] + w.hidden * error
        return parts

    @torch.no_grad()
    def _teach(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """What leaves the teacher's final norm where tokens are predicted, and what enters the student's own layers."""
        body = self._teacher[0].base_model
        streams: list[Tensor] = []

        def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            streams.append(args[0] if args else kwargs["hidden_states"])

        layer = body.layers[self.shared_layers]
        hook = layer.register_forward_pre_hook(keep, with_kwargs=True) if self.shared_layers else None
        try:
            out = body(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
        finally:
            if hook is not None:
                hook.remove()
        return predicted(out.last_hidden_state, batch.targets), streams[0] if streams else None


def relative_error(hidden: Tensor, given: Tensor) -> Tensor:
    """Sum over tokens [N, h] of |hidden - given|^2 / |given|^2, in fp32 at least."""
    precision = torch.promote_types(hidden.dtype, torch.float32)
    ours, theirs = hidden.to(precision), given.to(precision)
    return ((ours - theirs).square().sum(-1) / theirs.square().sum(-1).clamp(min=1e-12)).sum()


def _shared_layers(student: Any, teacher: Any) -> int:
    """How many first layers are the teacher's own tensors and train nothing; 0 where the embeddings are not."""
    bodies = student.base_model, teacher.base_model
    if not _same(*(body.get_input_embeddings() for body in bodies)):
        return 0
    count = 0
    for ours, theirs in zip(*(body.layers for body in bodies), strict=True):
        if not _same(ours, theirs):
            break
        count += 1
    return min(count, len(bodies[0].layers) - 1)


def _same(ours: Any, theirs: Any) -> bool:
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    return mine.keys() == other.keys() and all(p is other[name] and not p.requires_grad for name, p in mine.items())
