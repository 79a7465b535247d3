"""Rules of dynamic loss scales in plain Python, as sources of other libraries have them."""

import math


def counting(flags, scale, period, *, growth=2.0, backoff=0.5, floor=0.0, ceiling=math.inf):
    """Yields scale and count after each step by torch's `_amp_update_scale_`, with bounds.

    With bounds it is also the rule of Apex, Keras and mpx.
    """
    counter = 0
    for finite in flags:
        counter = counter + 1 if finite else 0
        if not finite:
            scale = max(scale * backoff, floor)
        elif counter >= period:
            scale, counter = min(scale * growth, ceiling), 0
        yield scale, counter


def megatron(flags, scale, period, hysteresis, *, floor=1.0):
    """Yields scale, count and tolerance after each step by Megatron-LM's `DynamicGradScaler`."""
    counter, tolerance = 0, hysteresis
    for finite in flags:
        if finite:
            counter += 1
            if counter == period:
                counter, tolerance, scale = 0, hysteresis, scale * 2
        else:
            counter, tolerance = 0, tolerance - 1
            if tolerance <= 0:
                scale = max(scale / 2, floor)
        yield scale, counter, max(tolerance, 0)
