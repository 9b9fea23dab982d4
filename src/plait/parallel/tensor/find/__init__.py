"""Finding the column- and row-parallel slices of any model.

finder            proposes slices for every pair of maps, and has them checked
alike             of layers that compute the same, a few are looked at
linear_maps       which modules are linear maps, and along which dims they can be cut
trace             one run in which every tensor knows what it was computed from
propose           from a row-parallel map backwards: what each rank needs
check             the code on a rank's slice against the whole, in float64
"""
