"""Random numbers that do not depend on the plan.

keyed             draws keyed by seed, step, place in the model and global element
distributions     converts random bits to the numbers of each operator; dropout layers of compiled units
philox            the random bits, drawn on the tensor's device by numpy, a kernel, or torch's operators
philox_kernel     that kernel, in Triton
sub_block         the random numbers of a rank that computes a part of a tensor
"""
