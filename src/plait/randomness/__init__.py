"""Random numbers that do not know how the model is split.

keyed             drawn as a function of seed, step, place in the model and global element
distributions     from random bits to what each operator draws; dropout layers of compiled units: one graph for all that are alike
philox            the random bits themselves, drawn where the tensor is: by numpy, by a kernel, or by torch's operators
philox_kernel     that kernel, in Triton
sub_block         the numbers of a rank that computes a part of a tensor
"""
