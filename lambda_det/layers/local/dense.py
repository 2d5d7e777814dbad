"""The dense einsum: an embedding for every pair of positions, 0 outside the scope (Figure 3)."""

from torch import Tensor

from lambda_det.layers.functional import position_output
from lambda_det.layers.position import dense_embedding


def dense_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """See :func:`lambda_det.layers.local.local_position_output`."""
    height, width = queries.shape[1:3]
    output = position_output(
        queries.flatten(1, 2), values.flatten(1, 2), dense_embedding(embedding, height, width)
    )
    return output.unflatten(1, (height, width))
