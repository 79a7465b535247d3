"""Loss scales: immutable pytrees that scale a loss, unscale gradients and adjust inside jit.

`_scales` has the interface and the loss scales. The order of use is `scaled_value_and_grad`
(`_gradients`), or `accumulated_value_and_grad` for a batch in parts (`_accumulating`), then
`jmp.transforms.with_loss_scale`, which unscales, checks, skips and adjusts. Their one public
address is `jmp`.
"""
