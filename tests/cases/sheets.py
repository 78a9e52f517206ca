"""Rows of a case as functions over tokens receive them, with numbers derived from each token's own log-prob."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.cases.completions import Made, MadeRow, build
from tests.cases.inputs import bearing
from tests.cases.path import Network

torch.set_num_threads(1)


class Sheet:
    """The rows of a case.

    Args:
        case: the completions.
        width: extra columns of padding.
        rows: the rows in another order than the completions'.
        codes: codes of the groups.
    """

    def __init__(
        self,
        case: Sequence[Made],
        *,
        width: int = 0,
        rows: list[MadeRow] | None = None,
        codes: Mapping[int, int] | None = None,
    ) -> None:
        self.batch = build(case, width=width, rows=rows, codes=codes)
        self.ids_R = self.batch.completion_ids_R
        """The completion of each row."""
        fresh_RT = self.batch.versions_RT > 0
        self.mask_RT = self.batch.sampled_RT & fresh_RT & bearing(case)[self.ids_R].unsqueeze(1)
        """Tokens that bear loss."""
        self.keys = [made.key for made in case]

    def number(self, frequency: float, outside: float = 0.0) -> Tensor:
        """float64 (R, T), in [-1, 1], different for each frequency; `outside` where nothing bears loss."""
        return torch.where(self.mask_RT, (frequency * self.batch.rollout_logprobs_RT).sin(), outside)

    def logprobs(self, network: Network) -> Tensor:
        """float64 (R, T): log-probs of all tokens, with gradient; 0 for the first token of each row."""
        logits = network(self.batch.tokens_RT).logits.log_softmax(dim=-1).roll(1, dims=1)
        result = logits.gather(2, self.batch.tokens_RT.unsqueeze(2)).squeeze(2)
        return torch.where(torch.arange(result.shape[1]) > 0, result, 0.0)

    def by_key(self, values_RT: Tensor) -> Tensor:
        """Return the values of the tokens that bear loss, ordered by key; values outside must be exactly 0."""
        assert (values_RT[~self.mask_RT] == 0).all()
        owners = self.ids_R.tolist()
        order = sorted(range(len(owners)), key=lambda row: (self.keys[owners[row]], row))
        return values_RT[order][self.mask_RT[order]]
