"""Kernels over a paged KV cache: pure functions on tensors, which know nothing of Pagefleet.

`reference` states what each operation means, in plain torch. The modules beside it, `cpu_*` and
`triton_*`, are fast twins of it, and `dispatch.select` picks the ones for a device. Shapes use one
alphabet everywhere:

    T  tokens of a step, all rows one after another      R  rows (sequences) of a step
    H  query heads                                       G  key/value heads (G divides H)
    D  head size                                         N  physical blocks of the pool
    S  slots (tokens) a block holds                      M  width of the block tables
"""
