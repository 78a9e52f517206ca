"""A completion's tokens in order, whichever rows they stand in: sheets for what runs along time."""

import torch
from torch import Tensor


class CompletionLayout:
    """Lays rows (R, T) into sheets (C, T'), a line to each completion, and takes sheets apart again.

    A row's span begins at its first sampled token and ends behind its last, so that prompts and padding take no place
    and tool tokens within keep theirs; a completion's spans follow one another in the order of its rows. A row without
    a token that counts lays nothing down: to reject a row is never to have had it.

    Example, two rows of one completion (p prompt, a sampled, t the tool's)::

        tokens_RT    [[p a a t b], [p p p c .]]
        sheet        [[a a t b c]]
        mask_CT      [[x x . x x]]

    Args:
        completion_ids_R: int64, the completion that each row belongs to, 0 ... completions - 1.
        num_completions: their number, C; some may have no row.
        mask_RT: bool, tokens that count. Sampled ones.
        sampled_RT: bool, tokens that the policy sampled, whether they count or not.
    """

    def __init__(self, completion_ids_R: Tensor, num_completions: int, mask_RT: Tensor, sampled_RT: Tensor) -> None:
        self.shape_RT = (rows, width) = mask_RT.shape
        laid_RT = sampled_RT & mask_RT.any(dim=1, keepdim=True)
        place_T = torch.arange(width, device=mask_RT.device, dtype=torch.int32)
        first_R = _row_min(torch.where(laid_RT, place_T, width))
        end_R = -_row_min(torch.where(laid_RT, -1 - place_T, 0))
        length_R = (end_R - first_R).clamp(min=0)
        length_C = length_R.new_zeros(num_completions).index_add_(0, completion_ids_R, length_R)
        self.shape_CT = (num_completions, int(length_C.max()) if num_completions else 0)
        # Where each row's span begins in its completion's line: behind those of the completion's earlier rows.
        order_R = torch.argsort(completion_ids_R, stable=True)
        before_R = torch.empty_like(length_R)
        before_R[order_R] = length_R[order_R].cumsum(0) - length_R[order_R]
        before_C = length_C.cumsum(0) - length_C
        begin_R = completion_ids_R * self.shape_CT[1] + before_R - before_C[completion_ids_R]
        # Every token on the sheet: its place among those of the rows, and among those of the sheet.
        span_RT = (place_T >= first_R.unsqueeze(1)) & (place_T < end_R.unsqueeze(1))
        self._rows_N = span_RT.reshape(-1).nonzero().squeeze(1)
        start_R = torch.arange(rows, device=mask_RT.device) * width + first_R
        self._dense_N = self._rows_N + torch.repeat_interleave(begin_R - start_R, length_R)
        self.mask_CT = self.to_dense(mask_RT, fill=False)
        """bool, tokens that count."""

    def to_dense(self, values_RT: Tensor, fill: float = 0.0) -> Tensor:
        """Values of rows as a sheet; `fill` where no token lies. What does not count is taken along as it is."""
        sheet_CT = values_RT.new_full(self.shape_CT, fill)
        return _copy_elements(values_RT, self._rows_N, sheet_CT, self._dense_N)

    def to_rows(self, values_CT: Tensor) -> Tensor:
        """A sheet's values back in their rows; 0 where a row has nothing on the sheet."""
        return _copy_elements(values_CT, self._dense_N, values_CT.new_zeros(self.shape_RT), self._rows_N)

    def on_last_token(self, values_C: Tensor) -> Tensor:
        """A sheet with each completion's number on its last token that counts, 0 elsewhere.

        A reward is a fact of the completion: a tool token at the end, or a token that was rejected, does not lose it.
        """
        return torch.where(self.last_CT, values_C.unsqueeze(1), 0.0)

    @property
    def last_CT(self) -> Tensor:
        """bool, each completion's last token that counts; none where it has none."""
        seen_CT = self.mask_CT.cumsum(dim=1)
        return self.mask_CT & (seen_CT == seen_CT[:, -1:])


class LeftPacking:
    """Packs the tokens of a mask to the left of their lines, in order and without holes, and puts them back.

    Args:
        mask_CT: bool, tokens to pack.
    """

    def __init__(self, mask_CT: Tensor) -> None:
        place_N = torch.arange(mask_CT.shape[1], device=mask_CT.device)
        self.mask_CN = place_N < mask_CT.sum(dim=1, keepdim=True)
        """bool, the packed tokens: as many in each line."""
        self._from_N = mask_CT.reshape(-1).nonzero().squeeze(1)
        self._to_N = self.mask_CN.reshape(-1).nonzero().squeeze(1)

    def pack(self, values_CT: Tensor) -> Tensor:
        """At their places in the packed sheet; 0 behind the last one."""
        return _copy_elements(values_CT, self._from_N, values_CT.new_zeros(values_CT.shape), self._to_N)

    def unpack(self, values_CN: Tensor) -> Tensor:
        """At their old places; 0 outside of the mask."""
        return _copy_elements(values_CN, self._to_N, values_CN.new_zeros(values_CN.shape), self._from_N)


def _copy_elements(values: Tensor, from_N: Tensor, into: Tensor, to_N: Tensor) -> Tensor:
    """Elements of one tensor, by their places in memory, copied into another."""
    into.view(-1).index_copy_(0, to_N, values.reshape(-1).index_select(0, from_N))
    return into


def _row_min(places_RT: Tensor) -> Tensor:
    """int64, the least of each row; 0 where rows have no width."""
    return (places_RT.amin(dim=1) if places_RT.shape[1] else places_RT.new_zeros(len(places_RT))).long()
