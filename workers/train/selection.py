"""Masks and verdicts of a batch under a run's settings: the one place where the two meet."""

from collections import Counter

import torch

from stream.errors import RecordError
from stream.records import Group
from stream.validity import DropReason, TruncationReason
from workers.settings import Settings
from workers.train.batch import Batch, collate
from workers.train.masks import Masks, derive, select_groups, too_old
from workers.train.metrics import count_states


def derive_masks(batch: Batch, settings: Settings, version: int) -> Masks:
    """The masks of a batch that is trained at this policy version.

    Tokens older than `pacing.max_token_age` are rejected; tokens whose engine log-prob is not finite bear no loss.
    """
    old_RT = too_old(batch.sampled_RT, batch.versions_RT, version, settings.pacing.max_token_age)
    return derive(
        batch.facts,
        batch.completion_ids_R,
        batch.sampled_RT,
        truncation={reason: settings.truncation_policy(reason) for reason in TruncationReason},
        rejected_RT=old_RT,
        unusable_RT=~torch.isfinite(batch.behaviour_logprobs_RT),
    )


def verdicts(batch: Batch, masks: Masks, settings: Settings) -> list[DropReason | None]:
    """For each group of the batch, why it is not worth training; None if it is."""
    return select_groups(
        batch.facts,
        masks,
        min_valid_rows=settings.min_valid_rows,
        drop_zero_variance=settings.algorithm.drop_zero_variance,
        singleton=settings.algorithm.singleton,
    )


def assess(group: Group, settings: Settings, version: int, vocabulary: int) -> tuple[DropReason | None, Counter[str]]:
    """Why this group is not worth training at this policy version (None if it is), and its completions by state.

    Raises:
        RecordError: the group cannot be trained as it stands (see `workers.train.batch.collate`), or a token id is not
            in the vocabulary.
    """
    batch = collate([group])
    if batch.tokens_RT.numel() and not 0 <= int(batch.tokens_RT.min()) <= int(batch.tokens_RT.max()) < vocabulary:
        raise RecordError(f"group {group.prompt.id}: a token id outside of the model's vocabulary of {vocabulary}")
    masks = derive_masks(batch, settings, version)
    return verdicts(batch, masks, settings)[0], count_states(batch.facts, masks)
