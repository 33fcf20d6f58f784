"""The dense part's products on a CPU's matrix tiles (Intel AMX), in kernels of our own.

oneDNN, through torch, gives bf16 products of bf16 matrices: each activation and gradient
is written, read and reordered several times, and what a product was worth more than bf16
is lost. Here matrices lie in memory as the tiles that the processor multiplies
(:mod:`dlrm_kernels.tiles.layout`), sums stay fp32, and what follows a product (bias, ReLU, its
mask, the bias' gradient, the next products' operands) happens while a block of the
result is in the first-level cache.

fp32 products are had from the same units by writing each number as a sum of two or three
bf16 numbers (Henry, Tang, Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence
Datatype For Higher-Precision Computations", arXiv:1904.06376): 3 products of pairs for a
relative error of 5e-6, 6 for one like fp32's own.
"""
