"""The maths: plain functions on tensors.

One legend of shape letters: ``B`` rows, ``T`` context tokens, ``N`` anchor slots (blocks), ``K``
block tokens (anchor included), ``M`` labelled slots, ``D`` hidden width, ``V`` vocabulary, ``H``
heads, ``F`` features.
"""
